#!/bin/sh
# check.py writes the rewards by name.
python3 "$(dirname "$0")/check.py"
