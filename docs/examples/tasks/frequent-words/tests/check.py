import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

TEXTS = {
    "plain": "one two two three three three",
    "cases": "The THE the; a A\nA-b b_b B9b don't",
    "ties": "d c b a d c b a e",
    "blank": "",
    "example": Path(__file__).with_name("example.txt").read_text(),
}
for name, text in TEXTS.items():
    counts = Counter(re.findall("[a-z]+", text.lower()))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    for number in (1, 3, 50):
        with tempfile.NamedTemporaryFile("w", suffix=" words.txt") as file:
            file.write(text)
            file.flush()
            ended = subprocess.run(
                ["sh", "top.sh", str(number), file.name], capture_output=True, text=True, timeout=20
            )
        found = [line.split() for line in ended.stdout.splitlines()]
        wanted = [[str(count), word] for word, count in ranked[:number]]
        assert found == wanted, f"{name}, {number}: {found} instead of {wanted}; {ended.stderr}"
