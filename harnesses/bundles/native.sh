#!/bin/sh
# @PROGRAM@ asks for a glibc of 2.17, so an image with a whole one runs it as it is. Elsewhere the bundle's own loader
# and libraries do. It then cannot start itself, since /proc/self/exe is the loader: see bash.sh. Programs beside it are
# found last, so that the image's own come first.
root=${0%/*/*}
PATH="${PATH:-/usr/bin:/bin}:$root/app/path"
export PATH
libraries=
[ -e /lib64/@LOADER@ ] && libraries=$(/lib64/@LOADER@ --list "$root/app/@MAIN@" 2>&1)
case $libraries in
  *"not found"*) ;;
  *"libc.so.6 => "*)
    [ -x /bin/bash ] || [ -x /usr/bin/bash ] || export SHELL="$root/bin/bash"
    exec "$root/app/@MAIN@" "$@"
    ;;
esac
SHELL="$root/bin/bash" USE_BUILTIN_RIPGREP=0
export SHELL USE_BUILTIN_RIPGREP
exec "$root/lib/@LOADER@" --library-path "$root/lib" "$root/app/@MAIN@" "$@"
