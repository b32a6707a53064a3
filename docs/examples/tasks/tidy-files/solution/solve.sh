#!/bin/bash
set -e
count=0
# The longest first, so that it finds its name free.
while IFS= read -r file; do
  name=${file#inbox/}
  date=${name:7:10}
  target="letters/${date:0:4}/${date:5}"
  mkdir -p "letters/${date:0:4}"
  [ -e "$target.txt" ] && target="$target-2"
  mv -- "$file" "$target.txt"
  count=$((count + 1))
done < <(find inbox -maxdepth 1 -type f -printf '%s %p\n' | sort -rn | cut -d ' ' -f 2- |
  grep -iE '^inbox/letter[ _][0-9]{4}-[0-9]{2}-[0-9]{2}\.txt$')
echo "$count" >letters/count.txt
