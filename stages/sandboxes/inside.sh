# Runs inside a sandbox that is entered from elsewhere. It is handed over as text, and kept in CONTROL when it runs for the
# first time there, so that nothing has to be installed:
#
#   sh inside.sh CONTROL ENCODING VERB ARGUMENT...
#
# An image must have a POSIX sh (dash, busybox ash and bash are tried), /proc, and the programs of $ry_tools; `setsid` if
# possible, else a signal that a command sends to its process group reaches this program too.
#
# What a command starts carries its mark: a number set as limit of file locks (RLIMIT_LOCKS), which no kernel since Linux
# 2.4.25 counts. It is inherited through fork, exec, setsid, daemons and emptied environments, everybody can read it in
# /proc, and only root can put it up again. Where sh cannot set it, ROLLYARD_PROCESS in the environment must do.
#
# What looks for processes, kills them and tells how they ended starts none itself: an agent may have used up all that a
# container may have, and dash ends when it cannot fork. Only where we see the processes of a whole machine, grep looks.
#
# In CONTROL/NAME, of one process: shim.TOKEN ("PID START_TIME"), started (TOKEN of the shim that made the claim), stdin,
# stdout, stderr, killed (it was asked for), exit ("STATUS exited|deadline|killed|memory"). The short ones are one write,
# complete once it ends in a newline. All variables start with ry_, so that none of them is one of the agent's.

ry_control=$1 ry_encoding=$2 ry_verb=$3
shift 3
ry_tools='cat dd grep head mkdir rm sleep tail tar wc'
ry_setsid=$(command -v setsid)

ry_clock() { # ry_now_ms: since the machine's start
  read -r ry_up ry_rest </proc/uptime
  ry_part=${ry_up#*.}
  ry_now_ms=$((${ry_up%.*} * 1000 + ${ry_part#0} * 10))
}

ry_fields() { ry_state=$1 ry_parent=$2; shift 19; ry_start=$1; }

ry_stat() { # of process $1: ry_state, ry_parent, ry_start; all empty when there is none
  ry_state='' ry_parent='' ry_start='' ry_line=''
  { read -r ry_line <"/proc/$1/stat"; } 2>/dev/null
  case $ry_line in *') '*) ry_fields ${ry_line##*) } ;; esac
}

ry_set_mark() { # this shell and all that it starts from now on carry $1
  ulimit -w "$1" 2>/dev/null || ulimit -x "$1" 2>/dev/null
  ROLLYARD_PROCESS=$1
  export ROLLYARD_PROCESS
}

ry_mark_of() { # of process $1: ry_mark; "unlimited" when it has none
  ry_mark=''
  { while read -r ry_a ry_b ry_c ry_mark ry_rest; do
    case "$ry_a $ry_b $ry_c" in 'Max file locks') break ;; esac
    ry_mark=''
  done <"/proc/$1/limits"; } 2>/dev/null
}

ry_signal() { # SIGNAL MARK: to all that carry it; MARK `all`: to all that carry any. ry_found: how many
  ry_found=0 ry_entries='/proc/[0-9]*/limits'
  [ "$ry_alone" = yes ] || ry_entries=$(grep -ls "^Max file locks  *$2 " $ry_entries)
  for ry_entry in $ry_entries; do
    ry_pid=${ry_entry#/proc/} ry_pid=${ry_pid%/limits}
    ry_mark_of "$ry_pid"
    case $2 in
      "$ry_mark") ;;
      all) case $ry_mark in ''|unlimited) continue ;; esac ;;
      *) continue ;;
    esac
    ry_stat "$ry_pid"
    case $ry_state in ''|Z|X) continue ;; esac
    ry_found=$((ry_found + 1))
    kill -s "$1" "$ry_pid" 2>/dev/null
  done
}

ry_kill() { # MARK: until two looks in a row find none, since one look can miss what forks meanwhile. At most 20 s
  ry_clock
  ry_give_up_ms=$((ry_now_ms + 20000)) ry_empty=0
  while [ "$ry_empty" -lt 2 ] && [ "$ry_now_ms" -lt "$ry_give_up_ms" ]; do
    # Stopped ones start no others in place of those that are killed.
    ry_signal STOP "$1"
    [ "$ry_found" -gt 16 ] && ry_signal STOP "$1"
    if [ "$ry_found" -gt 0 ]; then
      ry_empty=0
      ry_signal KILL "$1"
    else
      ry_empty=$((ry_empty + 1))
    fi
    ry_clock
  done
  if [ "$ry_marks" = environment ]; then
    for ry_entry in $(grep -ls "ROLLYARD_PROCESS=$1" /proc/[0-9]*/environ); do
      ry_pid=${ry_entry#/proc/}
      kill -s KILL "${ry_pid%/environ}" 2>/dev/null
    done
  fi
}

ry_nap() { # MS; carries the mark $2, so that nobody has to end it
  ry_fraction=$(($1 % 1000 + 1000))
  ( ry_set_mark "$2"; exec sleep "$(($1 / 1000)).${ry_fraction#1}" ) &
  wait "$!"
}

ry_watch() { # MARK MS: ends with 9 when it had to kill
  trap 'exit 0' TERM
  ry_clock
  ry_end_ms=$((ry_now_ms + $2))
  ry_stat self
  ry_owner=$ry_parent
  # Looks at the clock, since the agent may have killed our sleep; and whether whoever started us was killed as well.
  while [ "$ry_now_ms" -lt "$ry_end_ms" ] && [ "$ry_parent" = "$ry_owner" ]; do
    ry_nap "$((ry_end_ms - ry_now_ms))" "$1"
    ry_clock
    ry_stat self
  done
  trap '' TERM
  ry_kill "$1"
  exit 9
}

# ry_supervise MARK DEADLINE_MS BLOCKS CWD ENV_COUNT NAME=VALUE... COMMAND...
# Runs a command with output to descriptors 8 and 9 and kills what it leaves. ry_status, ry_late.
ry_supervise() {
  ry_id=$1 ry_deadline_ms=$2 ry_blocks=$3 ry_cwd=$4 ry_count=$5
  shift 5
  # `exec`, since a redirection of the function would keep copies to restore.
  ( exec </dev/null >/dev/null 2>&1 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; ry_watch "$ry_id" "$ry_deadline_ms" ) &
  ry_watcher=$!
  ( ry_become "$@" ) >&8 2>&9 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-
  ry_status=$?
  kill -s TERM "$ry_watcher"
  wait "$ry_watcher"
  ry_late=$?
  ry_kill "$ry_id"
} 2>/dev/null

ry_become() {
  cd -- "$ry_cwd" || exit 126
  unset OLDPWD
  ulimit -f "$ry_blocks"
  ry_set_mark "$ry_id"
  while [ "$ry_count" -gt 0 ]; do
    export "$1"
    shift
    ry_count=$((ry_count - 1))
  done
  if [ -n "$ry_setsid" ] && [ "$ry_verb" != shell ]; then
    exec "$ry_setsid" "$@"
  fi
  exec "$@"
}

ry_oom() { # ry_ooms: how many processes of this sandbox the kernel killed for want of memory, cgroup v2 or v1
  ry_ooms=0
  for ry_file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    { while read -r ry_key ry_value; do
      [ "$ry_key" = oom_kill ] && ry_ooms=$ry_value
    done <"$ry_file"; } 2>/dev/null
  done
}

ry_take() { # BYTES of standard input, no more and no less
  if [ "$ry_exact" = yes ]; then
    [ "$1" -lt 65536 ] || dd bs=65536 count="$(($1 / 65536))" iflag=fullblock 2>/dev/null
    [ "$(($1 % 65536))" -eq 0 ] || dd bs="$(($1 % 65536))" count=1 iflag=fullblock 2>/dev/null
  else
    [ "$1" -eq 0 ] || dd bs=1 count="$1" 2>/dev/null
  fi
}

ry_send() { # standard input, as the other side can take it
  if [ "$ry_encoding" = base64 ]; then base64; else cat; fi
}

ry_last() { # the last BYTES of standard input
  if [ "$ry_encoding" = base64 ]; then tail -c "$1" | base64; else exec tail -c "$1"; fi
}

# --- one process that outlives who started it

# ry_shim NAME TOKEN STDIN_BYTES MARK DEADLINE_MS BLOCKS CWD ENV_COUNT NAME=VALUE... COMMAND...
ry_shim() {
  ry_dir=$ry_control/$1 ry_token=$2 ry_bytes=$3
  shift 3
  mkdir -p -- "$ry_dir" || exit 73
  ry_stdin=/dev/null
  if [ "$ry_bytes" -gt 0 ]; then
    ry_stdin=$ry_dir/stdin.$ry_token
    ry_take "$ry_bytes" >"$ry_stdin"
    # Whoever started us may have died meanwhile.
    [ "$(wc -c <"$ry_stdin")" -eq "$ry_bytes" ] || exit 74
  fi
  ry_stat "$$"
  printf '%s %s\n' "$$" "$ry_start" >"$ry_dir/shim.$ry_token" || exit 73
  set -C
  { printf '%s\n' "$ry_token" >"$ry_dir/started"; } 2>/dev/null || { echo taken; exit 75; }
  set +C
  echo started
  # Descriptor 5 is held to the end, which tells whoever started us.
  exec 5>&1 </dev/null >/dev/null 2>&1
  ry_oom
  ry_ooms_before=$ry_ooms
  ry_supervise "$@" <"$ry_stdin" 8>"$ry_dir/stdout" 9>"$ry_dir/stderr"
  ry_reason=exited
  ry_oom
  # Of a script it may be a program that was killed, and the script that then failed.
  [ "$ry_status" -ne 0 ] && [ "$ry_ooms" -gt "$ry_ooms_before" ] && ry_reason=memory
  [ "$ry_late" -eq 9 ] && ry_reason=deadline
  [ -e "$ry_dir/killed" ] && ry_reason=killed
  printf '%s %s\n' "$ry_status" "$ry_reason" >"$ry_dir/exit"
}

ry_report() { # NAME: "ended STATUS REASON", "running", "dead" (its shim is, and left no word) or "none"
  ry_dir=$ry_control/$1
  if ! [ -e "$ry_dir/started" ]; then
    echo none
  elif ry_read_exit; then
    echo "ended $ry_ended"
  elif ry_shim_lives; then
    echo running
  elif ry_read_exit; then # it may have been written just before the shim ended
    echo "ended $ry_ended"
  else
    echo dead
  fi
}

ry_claim() { cat -- "$ry_control/$1/started" 2>/dev/null; } # NAME

ry_read_exit() { read -r ry_ended <"$ry_dir/exit"; } 2>/dev/null

ry_shim_lives() {
  { read -r ry_token <"$ry_dir/started" && read -r ry_pid ry_began <"$ry_dir/shim.$ry_token"; } 2>/dev/null || return 1
  ry_stat "$ry_pid"
  case $ry_state in ''|Z|X) return 1 ;; esac
  [ "$ry_start" = "$ry_began" ]
}

ry_stop() { # NAME MARK
  ry_dir=$ry_control/$1
  [ -e "$ry_dir/started" ] || return 0
  # echo, since dash ends when a redirection of `:` fails.
  ry_read_exit || { echo >"$ry_dir/killed"; } 2>/dev/null
  ry_kill "$2"
}

ry_output() { # NAME BYTES
  ( ry_last "$2" <"$ry_control/$1/stdout" >&5 ) 2>/dev/null
  ( ry_last "$2" <"$ry_control/$1/stderr" >&6 ) 2>/dev/null
}

# --- a channel: requests as shell code on standard input, one after another

ry_serve() { # FOLDER...
  for ry_tool in $ry_tools; do
    command -v "$ry_tool" >/dev/null || ry_missing="$ry_missing $ry_tool"
  done
  [ -z "$ry_missing" ] && ry_problem=$(mkdir -p -- "$ry_control" "$@" 2>&1)
  exec 5>&1 6>&2
  while read -r ry_kind ry_count; do
    ry_code=''
    if [ "$ry_kind" = bytes ]; then
      ry_code=$(ry_take "$ry_count")
    else
      while [ "$ry_count" -gt 0 ]; do
        IFS= read -r ry_line || exit
        ry_code="$ry_code$ry_line
" ry_count=$((ry_count - 1))
      done
    fi
    eval "$ry_code"
  done
}

ry_hello() { # what stands in the way, in two lines
  echo "$ry_missing"
  echo "$ry_problem"
}

ry_reply() { # NONCE STATUS: the end of an answer, on both streams
  printf '\n%s %s\n' "$1" "$2"
  printf '\n%s\n' "$1" >&2
}

# ry_exec MAX_BYTES STDIN_BYTES MARK DEADLINE_MS BLOCKS CWD ENV_COUNT NAME=VALUE... COMMAND...
# Output passes through tail, so that neither disk nor memory holds more than its end. ry_outcome: "STATUS LATE".
ry_exec() {
  ry_max=$1 ry_bytes=$2
  shift 2
  ry_stdin=/dev/null
  if [ "$ry_bytes" -gt 0 ]; then
    ry_stdin=$ry_control/stdin.$1
    ry_take "$ry_bytes" >"$ry_stdin"
  fi
  ry_outcome=$(
    exec 4>&1
    { { ry_supervise "$@" <"$ry_stdin" 8>&1 9>&7 7>&-; echo "$ry_status $ry_late" >&4; } | ry_last "$ry_max" >&5 7>&- 4>&-
    } 7>&1 | ry_last "$ry_max" >&6 4>&-
  )
  [ "$ry_bytes" -eq 0 ] || rm -f -- "$ry_stdin"
}

ry_put() { # BASE PATH BYTES: a file below BASE, in place of one that is there
  ry_target=$1/$2
  (
    mkdir -p -- "${ry_target%/*}" && cd -P -- "$1" && ry_top=$PWD && cd -P -- "${ry_target%/*}" || exit 1
    case $PWD/ in
      "${ry_top%/}"/*) ;;
      *) echo 'it leaves the sandbox through a link' >&2; exit 1 ;;
    esac
    rm -f -- "${ry_target##*/}"
    ry_take "$3" >"${ry_target##*/}"
  )
}

ry_get() { # PATH BYTES: the start of a regular file; status 3: there is none
  [ -f "$1" ] || return 3
  ( head -c "$2" <"$1" | ry_send >&5 )
}

ry_unpack() { # FOLDER BYTES tar, as whoever asks; what is not read would be taken for the next request
  ( mkdir -p -- "$1" && ry_take "$2" | { tar -x -o -f - -C "$1"; ry_code=$?; cat >/dev/null; exit "$ry_code"; } )
}

ry_pack() { # BYTES FOLDER NAME PATTERN...: the first BYTES of a tar archive of FOLDER/NAME; status 3: there is none
  [ -e "$2/$3" ] || [ -L "$2/$3" ] || return 3
  (
    ry_max=$1 ry_name=$3 ry_list=$ry_control/exclude.$$
    cd -- "$2" || exit 1
    shift 3
    # The tar of busybox knows no `--`, and excludes nothing: then the other side does.
    case $ry_name in -*) ry_name=./$ry_name ;; esac
    if [ "$#" -gt 0 ]; then
      printf '%s\n' "$@" >"$ry_list" || exit 1
      set -- -X "$ry_list"
      tar -c -f /dev/null "$@" /dev/null 2>/dev/null || shift "$#"
    fi
    ry_code=$({ { tar -c -f - "$@" "$ry_name" 4>&-; echo "$?" >&4; } | head -c "$ry_max" | ry_send >&5; } 4>&1)
    exit "$ry_code"
  )
}

ry_interrupt() { # MARK of a shell
  { read -r ry_pid <"$ry_control/shell.$1" && kill -s INT -- "-$ry_pid"; } 2>/dev/null
}

# --- what runs in a stream of its own

# ry_shell MARK BLOCKS CWD ENV_COUNT NAME=VALUE... COMMAND...
ry_shell() {
  ry_id=$1 ry_blocks=$2 ry_cwd=$3 ry_count=$4
  shift 4
  { echo "$$" >"$ry_control/shell.$ry_id"; } 2>/dev/null
  ry_become "$@" 2>&1
}

# The first process of a container. It is the one that nothing inside can kill. It reaps what loses its parent.
# ry_first SECONDS FOLDER...: folders that every user may write to. Ends after so many seconds, when CONTROL/deadline
# says nothing else: "at MS" of the clock, read at signal USR1 as long as it was never "fixed MS". At USR2 it kills all
# that carries a mark.
ry_first() {
  ry_clock
  ry_first_ms=$((ry_now_ms + $1 * 1000)) ry_fixed=''
  shift
  mkdir -p -m 1777 -- "$@"
  trap 'exit 0' TERM
  trap ry_new_deadline USR1
  trap 'ry_kill all' USR2
  while ry_clock; [ "$ry_now_ms" -lt "$ry_first_ms" ]; do
    ry_left_ms=$((ry_first_ms - ry_now_ms))
    sleep "$((ry_left_ms / 1000 + 1))" &
    ry_sleep=$!
    wait "$ry_sleep" || kill -s KILL "$ry_sleep" 2>/dev/null
  done
}

ry_new_deadline() {
  [ -z "$ry_fixed" ] && { read -r ry_kind ry_seconds <"$ry_control/deadline"; } 2>/dev/null || return
  ry_clock
  ry_first_ms=$((ry_now_ms + ry_seconds * 1000))
  [ "$ry_kind" = fixed ] && ry_fixed=yes
}

ry_marks=limit ry_exact=no ry_alone=no
# The first process of a container has no parent, and what is entered into one has none there.
ry_stat self
[ "$ry_parent" = 0 ] && ry_alone=yes
case $ry_verb in
  serve|shim)
    [ "$(printf ab | dd bs=2 count=1 iflag=fullblock 2>/dev/null)" = ab ] && ry_exact=yes
    ( { ulimit -w 4242 || ulimit -x 4242; } 2>/dev/null && [ -r /proc/self/limits ] ) || ry_marks=environment
    ;;
esac
"ry_$ry_verb" "$@"
