#!/bin/sh
# The verdict is in the reward file; the exit status says nothing.
if python3 "$(dirname "$0")/check.py"; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
