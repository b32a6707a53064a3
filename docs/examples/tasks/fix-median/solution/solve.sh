#!/bin/bash
set -e
cp "$(dirname "$0")/stats.py" stats.py
