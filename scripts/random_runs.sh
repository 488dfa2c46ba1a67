#!/usr/bin/env bash
# Runs what draws numbers, each time with another seed, for so many minutes; ends with the first run
# that fails, which says the command that repeats it. usage: random_runs.sh MINUTES
set -euo pipefail
cd "$(dirname "$0")/.."
minutes=$1
runs=0
until [ $((SECONDS / 60)) -ge "$minutes" ]; do
  seed=$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')
  echo "random: run $((runs + 1)), KVW_SEED=$seed"
  make KVW_SEED="$seed" test-native test-python ARGS="--random-only -q" || {
    echo "random: KVW_SEED=$seed failed, after $runs that passed" >&2
    exit 1
  }
  runs=$((runs + 1))
done
echo "random: $runs runs passed, each with a seed of its own"
