import sys
from pathlib import Path

found = Path("culprit.txt")
sys.exit(not (found.is_file() and found.read_text().strip() == "89f8ffe4147b538b7655397e0fde09d5aaa6fc94"))
