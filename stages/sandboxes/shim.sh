#!/bin/sh
# Owns one process of a sandbox on this machine: starts it once, keeps its exit status, and ends it at the deadline or when no
# worker renews the lease. It outlives the worker that started it. POSIX sh and /proc; elsewhere than on Linux it needs
# ps, and processes that leave their process group are not found.
#
# Its variables start with shim_, so that none of them changes one of the agent's.
#
# usage: shim.sh CONTROL WORK STDIN LEASE LEASE_MS DEADLINE_MS MARK TOKEN BOOT BLOCKS SETSID PYTHON COMMAND...
# The environment is the agent's. File descriptor 9 holds a lock: who can take that lock knows that this shim is dead.
# Descriptor 8, if there is one, is for COMMAND.
# In CONTROL: started (TOKEN of the shim that made the claim), pid ("PID START_TIME BOOT"), stdout, stderr,
# exit ("STATUS exited|deadline|lease|killed|memory"). Each is one short write, complete once it ends in a newline.

shim_control=$1 shim_work=$2 shim_stdin=$3 shim_lease=$4 shim_lease_ms=$5 shim_deadline_ms=$6
shift 6
shim_mark=$1 shim_token=$2 shim_boot=$3 shim_blocks=$4 shim_setsid=$5 shim_python=$6
shift 6
shim_agent_path=$PATH
PATH=/usr/local/bin:/usr/bin:/bin:$PATH

set -C
{ printf '%s\n' "$shim_token" >"$shim_control/started"; } 2>/dev/null || exit 75
set +C

# Field 22 of /proc/PID/stat, given the fields that follow the program's name.
set_start_time() { shift 19; shim_start_time=$1; }

write_pid() {
  if [ -r /proc/self/stat ]; then
    # The shell itself opens the file, so /proc/self is this subshell, which becomes the agent.
    read -r shim_line </proc/self/stat
    set_start_time ${shim_line##*) }
    printf '%s %s %s\n' "${shim_line%% *}" "$shim_start_time" "$shim_boot" >"$shim_control/pid"
  else
    sh -c 'printf "%s %s %s\n" "$PPID" "$(ps -o lstart= -p "$PPID" | tr " " "_")" "$1" >"$2"' \
      sh "$shim_boot" "$shim_control/pid"
  fi
}

kill_group() {
  read -r shim_agent shim_rest <"$shim_control/pid" && kill -s KILL -- "-$shim_agent"
} 2>/dev/null

end_everything() {
  trap '' TERM
  # echo, since a failed redirection of `:` ends the shell.
  echo >"$shim_control/$1"
  kill_group
  # Two empty looks in a row, since a process has no environment for a moment while it executes another program.
  shim_rounds=20 shim_empty=0
  while [ "$shim_rounds" -gt 0 ] && [ "$shim_empty" -lt 2 ]; do
    # The status of grep says nothing: processes come and go while it reads.
    shim_marked=$(grep -ls "ROLLYARD_PROCESS=$shim_mark" /proc/[0-9]*/environ)
    if [ -z "$shim_marked" ]; then
      shim_empty=$((shim_empty + 1))
      sleep 0.02
      continue
    fi
    shim_empty=0
    for shim_file in $shim_marked; do
      shim_pid=${shim_file#/proc/}
      kill -s KILL "${shim_pid%/environ}"
    done
    shim_rounds=$((shim_rounds - 1))
  done
}

watch() {
  # KILL, since a child that has not executed sleep yet would catch TERM.
  trap 'kill -s KILL "$!"; wait "$!"; exit 0' TERM
  shim_left_ms=$shim_deadline_ms
  while :; do
    shim_nap_ms=$shim_lease_ms
    [ "$shim_left_ms" -lt "$shim_nap_ms" ] && shim_nap_ms=$shim_left_ms
    shim_fraction=$((shim_nap_ms % 1000 + 1000))
    sleep "$((shim_nap_ms / 1000)).${shim_fraction#1}" &
    wait "$!"
    if [ -e "$shim_control/killed" ] || ! [ -e "$shim_control" ]; then
      return
    fi
    shim_left_ms=$((shim_left_ms - shim_nap_ms))
    if [ "$shim_left_ms" -le 0 ]; then
      end_everything deadline
      return
    elif [ "$shim_lease" -nt "$shim_control/tick" ]; then
      echo >"$shim_control/tick"
    else
      end_everything lease
      return
    fi
  done
}

echo >"$shim_control/tick"
# `exec` closes the lock for good; a redirection of `watch` would keep a copy to restore.
( exec 8<&- 9>&-; watch ) &
shim_watcher=$!

# In the foreground, since sh lets background jobs ignore SIGINT for good.
(
  write_pid
  cd "$shim_work" || exit 126
  unset OLDPWD
  ulimit -f "$shim_blocks"
  PATH=$shim_agent_path ROLLYARD_PROCESS=$shim_mark
  export PATH ROLLYARD_PROCESS
  if [ -n "$shim_setsid" ]; then
    exec "$shim_setsid" "$@"
  fi
  exec "$shim_python" -I -S -c 'import os, sys; os.setsid(); os.execvp(sys.argv[1], sys.argv[1:])' "$@"
) <"$shim_stdin" >"$shim_control/stdout" 2>"$shim_control/stderr" 9>&-
shim_status=$?

# Both reap what they started: the first process of a container may never do it for them.
kill "$shim_watcher"
wait "$shim_watcher"
kill_group
shim_reason=exited
for shim_mark_file in deadline lease killed memory; do
  [ -e "$shim_control/$shim_mark_file" ] && shim_reason=$shim_mark_file
done
printf '%s %s\n' "$shim_status" "$shim_reason" >"$shim_control/exit"
