#!/bin/sh
# bash for agents that want one: the image's, else the bundle's. Claude Code replaces grep, find and rg by itself, called
# by those names; with no program at the path that it gives, the real ones are called.
root=${0%/*/*}
CLAUDE_CODE_EXECPATH=
export CLAUDE_CODE_EXECPATH
for bash in /bin/bash /usr/bin/bash /usr/local/bin/bash; do
  [ -x $bash ] && SHELL=$bash exec $bash "$@"
done
exec "$root/lib/@LOADER@" --library-path "$root/lib" "$root/app/bash" "$@"
