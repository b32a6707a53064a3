from pathlib import Path


def tree(top):
    return {str(path.relative_to(top)): path.read_text().strip() for path in sorted(Path(top).rglob("*")) if path.is_file()}


assert tree("letters") == {
    "2023/11-02.txt": "Dear yard, the lamp is out.",
    "2023/12-31.txt": "With dash.",
    "2024/01-15.txt": "The lamp is out again. It was out last week as well.",
    "2024/01-15-2.txt": "Short one.",
    "2024/02-29.txt": "Third.",
    "count.txt": "5",
}, tree("letters")
assert tree("inbox") == {
    "letter_2024-03.txt": "x",
    "letters 2024-03-01.txt": "No letter.",
    "list 2024-03-02.txt": "A list.",
    "old/letter_2019-05-05.txt": "An old letter.",
}, tree("inbox")
