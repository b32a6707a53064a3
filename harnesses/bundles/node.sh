#!/bin/sh
# node, by the bundle's own loader and libraries. exec_path.cjs makes child processes come here as well.
root=${0%/*/*}
exec "$root/lib/@LOADER@" --library-path "$root/lib" "$root/app/node" --require "$root/app/exec_path.cjs" @MAIN@"$@"
