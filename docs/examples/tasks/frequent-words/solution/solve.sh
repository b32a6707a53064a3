#!/bin/bash
cat >top.sh <<'SHELL'
tr 'A-Z' 'a-z' <"$2" | tr -cs 'a-z' '\n' | grep . | LC_ALL=C sort | uniq -c | LC_ALL=C sort -k1,1nr -k2,2 |
  head -n "$1" | while read -r count word; do echo "$count $word"; done
SHELL
