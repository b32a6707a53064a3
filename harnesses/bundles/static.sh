#!/bin/sh
# @PROGRAM@ needs no library. Programs beside it are found last, so that the image's own come first.
root=${0%/*/*}
PATH="${PATH:-/usr/bin:/bin}:$root/app/path"
export PATH
exec "$root/app/@MAIN@" "$@"
