#!/bin/sh
# Ends one instance when no worker renews the lease, or at its deadline, whichever comes first. It outlives the worker that
# started it, and ends when its folder is gone.
#
# usage: apptainer_keeper.sh FOLDER LEASE LEASE_S DEADLINE_S STOP...
# In FOLDER: tick, touched at each look at LEASE that found it renewed.

keeper_folder=$1 keeper_lease=$2 keeper_lease_s=$3 keeper_left_s=$4
shift 4

echo >"$keeper_folder/tick"
while [ "$keeper_left_s" -gt 0 ]; do
  keeper_nap_s=$keeper_lease_s
  [ "$keeper_left_s" -lt "$keeper_nap_s" ] && keeper_nap_s=$keeper_left_s
  sleep "$keeper_nap_s"
  [ -d "$keeper_folder" ] || exit 0
  keeper_left_s=$((keeper_left_s - keeper_nap_s))
  [ "$keeper_lease" -nt "$keeper_folder/tick" ] || break
  echo >"$keeper_folder/tick"
done
exec "$@"
