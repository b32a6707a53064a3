#!/bin/sh
# Keeps the files and the network of one bubblewrap sandbox: what it mounts is seen in its own mount namespace only, and
# is gone when the last process in that is. It outlives the worker that started it, and ends by itself at its deadline, or
# when no worker renews the lease, or when the sandbox's folder is gone. What runs in the sandbox does the same by itself.
#
# usage: sh -c TEXT holder keep LEASE FOLDER LEASE_MS DEADLINE_MS BASE DISK_BYTES INODES LAYERS own|open
#                               [PLACE|-l TARGET LINK]...
#        sh -c TEXT holder show STATE COUNT SOURCE... COMMAND...
#
# keep: in a user and a mount namespace of its own, for "own" a network namespace too. BASE gets a file system of limited
# size: u and w (what is written), m (the root: LAYERS with u above them; empty LAYERS: a folder), shm. PLACEs are folders
# that are made in the root. Prints "ready" to standard output, and closes it.
# show: as root, in a mount namespace of its own, before it becomes the user that keeps. /tmp gets the SOURCEs as s0, s1,
# ... and an empty folder `base`, since that user may have no way to where they are.

holder_verb=$1
shift

fail() {
  echo "$1"
  exit 1
}

loopback() {
  ip link set lo up 2>/dev/null && return
  ifconfig lo up 2>/dev/null && return
  for holder_python in python3 /usr/libexec/platform-python; do
    "$holder_python" -I -S -c '
import fcntl, socket, struct
with socket.socket() as sock:
    fcntl.ioctl(sock, 0x8914, struct.pack("16sH14x", b"lo", 0x41))
' 2>/dev/null && return
  done
  fail "the loopback device cannot be brought up: neither ip, ifconfig nor python3 is there"
}

show() {
  holder_state=$1 holder_count=$2 holder_number=0 holder_places=base
  shift 2
  while [ "$holder_number" -lt "$holder_count" ]; do
    holder_places="$holder_places s$holder_number"
    holder_number=$((holder_number + 1))
  done
  mount -t tmpfs -o size=1m,mode=755 rollyard "$holder_state" || fail "root may not mount here (CAP_SYS_ADMIN)"
  cd "$holder_state" && mkdir $holder_places || fail "folders cannot be made"
  holder_number=0
  while [ "$holder_number" -lt "$holder_count" ]; do
    mount --bind "$1" "s$holder_number" || fail "the folder $1 cannot be mounted"
    shift
    holder_number=$((holder_number + 1))
  done
  cd / && mount --move "$holder_state" /tmp || fail "/tmp cannot be mounted on"
  exec "$@"
}

watch() {
  echo >"$holder_base/tick"
  while [ "$holder_left_ms" -gt 0 ]; do
    holder_nap_ms=$holder_lease_ms
    [ "$holder_left_ms" -lt "$holder_nap_ms" ] && holder_nap_ms=$holder_left_ms
    holder_fraction=$((holder_nap_ms % 1000 + 1000))
    sleep "$((holder_nap_ms / 1000)).${holder_fraction#1}"
    holder_left_ms=$((holder_left_ms - holder_nap_ms))
    [ -d "$holder_folder" ] && [ "$holder_lease" -nt "$holder_base/tick" ] || return
    echo >"$holder_base/tick"
  done
}

keep() {
  holder_lease=$1 holder_folder=$2 holder_lease_ms=$3 holder_left_ms=$4
  shift 4
  holder_base=$1 holder_bytes=$2 holder_inodes=$3 holder_layers=$4 holder_network=$5
  shift 5
  mount -t tmpfs -o "size=$holder_bytes,nr_inodes=$holder_inodes,mode=755" rollyard "$holder_base" ||
    fail "a file system in memory (tmpfs) cannot be mounted"
  mkdir "$holder_base/u" "$holder_base/w" "$holder_base/m" "$holder_base/shm" || fail "folders cannot be made"
  if [ -n "$holder_layers" ]; then
    mount -t overlay -o "userxattr,lowerdir=$holder_layers,upperdir=$holder_base/u,workdir=$holder_base/w" rollyard \
      "$holder_base/m" || fail "an overlay cannot be mounted: it needs Linux 5.11 or later"
  fi
  while [ "$#" -gt 0 ]; do
    if [ "$1" = -l ]; then
      ln -s "$2" "$holder_base/m$3" || fail "the link $3 cannot be made"
      shift 3
    else
      mkdir -p "$holder_base/m$1" || fail "the folder $1 cannot be made"
      shift
    fi
  done
  [ "$holder_network" = open ] || loopback
  echo ready
  exec </dev/null >/dev/null 2>&1
  watch
}

"$holder_verb" "$@"
