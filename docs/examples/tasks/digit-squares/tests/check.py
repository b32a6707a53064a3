import sys
from pathlib import Path

found = Path("answer.txt")
sys.exit(not (found.is_file() and found.read_text().strip().replace(",", "") == "856929"))
