#!/usr/bin/env bash
# Runs a target of make RUNS times while stress-ng keeps each core busy, as a machine that others
# use. Goes on after a run that failed, since which tests do is what it is for.
# usage: busy_runs.sh RUNS TARGET
set -euo pipefail
cd "$(dirname "$0")/.."
runs=$1 target=$2
logs=build/busy/$target
if ! command -v stress-ng >/dev/null; then
  EXTRA=busy scripts/system_packages.sh
fi
rm -rf "$logs"
mkdir -p "$logs"
stress-ng --quiet --cpu 0 --timeout 0 & # 0: one for each core, for ever
trap "kill $! 2>/dev/null || true" EXIT
failed=0
for ((run = 1; run <= runs; ++run)); do
  began=$SECONDS status=passed
  # The make above hands its ARGS on, which are not this target's.
  make "$target" ARGS= >"$logs/$run.log" 2>&1 || { status=FAILED failed=$((failed + 1)); }
  grep -E '^(FAILED|ERROR) |[0-9]+ passed.* in |tests passed,' "$logs/$run.log" || true
  echo "busy: run $run of $runs, make $target: $status in $((SECONDS - began)) s; $logs/$run.log"
done
echo "busy: make $target beside stress-ng: $((runs - failed)) of $runs runs passed"
exit $((failed > 0))
