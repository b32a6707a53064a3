#!/bin/bash
set -e
python3 - <<'PYTHON'
import csv
import json
from collections import Counter

with open("sales.csv", newline="") as file:
    rows = dict.fromkeys((row["date"], row["region"], row["amount"]) for row in csv.DictReader(file))
regions, months = Counter(), Counter()
for date, region, text in rows:
    if text.strip():
        amount = float(text.replace("$", "").replace(",", ""))
        regions[region.strip().lower()] += amount
        months[date[:7]] += amount
report = {
    "total": round(sum(regions.values()), 2),
    "by_region": {name: round(value, 2) for name, value in regions.items()},
    "best_month": max(months, key=months.get),
}
with open("report.json", "w") as file:
    json.dump(report, file)
PYTHON
