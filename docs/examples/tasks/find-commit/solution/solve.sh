#!/bin/bash
set -e
git clone -q -b main history.bundle repository
cd repository
for commit in $(git rev-list --reverse main); do
  git checkout -q "$commit"
  if [ "$(python3 fares.py 12)" != 31 ]; then
    echo "$commit" >../culprit.txt
    break
  fi
done
cd ..
rm -rf repository
