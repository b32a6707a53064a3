#!/bin/bash
python3 - >answer.txt <<'PYTHON'
def ends(number):
    while number not in (1, 89):
        number = sum(int(digit) ** 2 for digit in str(number))
    return number

# After one step a number below a million is at most 6 * 81.
known = {number: ends(number) for number in range(1, 487)}
squares = [digit * digit for digit in range(10)]
sums = {0: 1}
for _ in range(6):
    more = {}
    for total, count in sums.items():
        for square in squares:
            more[total + square] = more.get(total + square, 0) + count
    sums = more
print(sum(count for total, count in sums.items() if total and known[total] == 89))
PYTHON
