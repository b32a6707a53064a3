#!/bin/sh
# Python, by the bundle's own loader and libraries. sitecustomize.py makes child processes come here as well.
root=${0%/*/*}
exec "$root/lib/@LOADER@" --library-path "$root/lib" "$root/bin/.python" @MAIN@"$@"
