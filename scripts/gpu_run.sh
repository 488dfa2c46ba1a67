#!/usr/bin/env bash
# Everything this project wants to know of a GPU machine: its facts, the tests that need a device,
# the figures. Needs no network in a tree out of `make gpu-kit`. Step by step; where one fails the
# others go on.
# usage: gpu_run.sh [RESULTS_FOLDER]     (default gpu-results-DATE-TIME here; new, or empty)
# The folder to bring back: a log of each step, steps.txt with what became of them, docs/gpu.md as
# the bench wrote it, and what that is made of. Ends with 1 where a step failed, 0 too where there
# is no GPU.
# Settings in the environment:
#   PARTS    of the bench: pinned,hbm,nvme,ttft       LENGTHS  prompts of ttft: 1024,32768
#   ROUNDS   of the bench: 3                          DIR      on the disk to measure: /tmp
#   LIMIT_S  seconds that each step may take: 600     PYTHON   with torch and CuPy: python3
set -uo pipefail
usage() { sed -n '2,/^set /{/^# /s/^# //p}' "$0"; exit "$1"; }
case "${1:-}" in -h | --help) usage 0 ;; -*) usage 2 >&2 ;; esac

results=$(realpath -m "${1:-gpu-results-$(date +%Y%m%d-%H%M%S)}")
parts=${PARTS:-pinned,hbm,nvme,ttft} limit_s=${LIMIT_S:-600}
LENGTHS=${LENGTHS:-1024,32768} ROUNDS=${ROUNDS:-3}
DIR=$(realpath -m "${DIR:-${TMPDIR:-/tmp}}")
PYTHON=${PYTHON:-python3}
[[ $PYTHON != */* ]] || PYTHON=$(realpath -s "$PYTHON")
PATH=$PATH:/usr/local/cuda/bin  # for nvcc
SKIPPED=77  # a step's status, as bench/gpu_facts.py has it
export LENGTHS ROUNDS DIR PYTHON SKIPPED HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
unset MAKEFLAGS MAKELEVEL
cd "$(dirname "$0")/.." || exit 1
mkdir -p "$results" "$DIR" || exit 2
if [ -n "$(ls -A "$results")" ]; then
  echo "gpu run: $results is not empty; name a new folder" >&2
  exit 2
fi

# --- the steps; each in a shell of its own, its output in a log

machine() {
  local each
  for each in "cat build/gpu-kit.commit" nvidia-smi "nvidia-smi topo -m" "uname -a" \
    "head -n 2 /etc/os-release" "c++ --version" "cmake --version" "nvcc --version" \
    '"$PYTHON" --version' packages "free -m" 'df -h / /dev/shm "$DIR"' lsblk lscpu \
    "ldconfig -p | grep -E 'nvrtc|cufile|uring'" \
    "ls /usr/include/xxhash.h /usr/include/liburing.h" "head -n 20 /proc/modules"; do
    printf '\n$ %s\n' "$each"
    eval "$each" 2>&1 || echo "(ended with $?)"
  done
  local gpus
  gpus=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null) ||
    gpus="no GPU"
  printf '\n%s cores, %s\n' "$(nproc)" "${gpus//$'\n'/; }"
}

packages() {
  "$PYTHON" -c '
from importlib import metadata
for name in ("torch", "cupy-cuda13x", "cupy-cuda12x", "transformers", "numpy"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "is not here")'
}

setup() { make setup-gpu; }

facts() { "$PYTHON" bench/gpu_facts.py --dir "$DIR"; }

kernels() {
  command -v nvcc >/dev/null || { echo "nvcc is not here"; exit "$SKIPPED"; }
  nvidia-smi -L >/dev/null || { echo "no GPU here"; exit "$SKIPPED"; }
  mkdir -p build
  nvcc -O3 -std=c++17 -arch=native -I . -o build/kernel_bench bench/kvwarehouse_bench/gpu/kernel_bench.cu
  build/kernel_bench
}

tests() {
  local cores beside=0
  cores=$(nproc)
  [ "$cores" -eq 1 ] || beside=$((cores < 8 ? cores : 8))
  make test-gpu ARGS="-v --durations=12 -n $beside"
}

bench() {  # part
  .venv-gpu/bin/python bench/gpu.py --parts "$1" --rounds "$ROUNDS" --lengths "$LENGTHS" \
    --dir "$DIR" --write
}

# --- running them

failed=() no_gpu='' no_setup='' running=''

# step NAME SHELL_FUNCTION [ARGUMENTS]: runs it; a line in the table. Ends with its status.
step() {
  local name=$1 began=$SECONDS status state last log="$results/$1.txt"
  shift
  timeout -k 10 "$limit_s" bash -euo pipefail -c '"$@"' step "$@" </dev/null >"$log" 2>&1 &
  running=$!
  wait "$running"
  status=$? running=''
  last=$(told "$name" "$log")
  case $status in
    0) state=ok; ! did_nothing "$last" || state=skipped ;;
    "$SKIPPED") state=skipped ;;
    124 | 137) state=failed last="not through in $limit_s s: $last" ;;
    *) state=failed ;;
  esac
  row "$name" "$state" $((SECONDS - began)) "$last"
  return "$status"
}

# Likewise, one that needs what the setup makes.
gpu_step() {
  if [ -n "$no_setup" ]; then
    row "$1" skipped 0 "the setup failed"
    return 1
  fi
  step "$@"
}

row() {  # name, state, seconds, what was said last
  [ "$2" != failed ] || failed+=("$1")
  printf '%-13s %-8s %5s s  %.120s\n' "$@" | tee -a "$results/steps.txt"
}

# What a step's log says in one line: a part of the bench says its outcome before its table.
told() {  # name, log
  grep -m 1 "^${1#bench_}: " "$2" ||
    grep -vE '^(make(\[[0-9]+\])?: |[[:space:]]*$)' "$2" | tail -n 1
}

# Tests that were all skipped and parts of the bench end well without a device: by their last words.
did_nothing() {
  [[ $1 =~ (^=+\ [0-9]+\ skipped\ in\ |:\ no\ GPU$|,\ and\ no\ device$) ]]
}

# After each part: what is known so far is there if the rest does not come.
bring() {
  cp docs/gpu.md "$results/gpu.md"
  [ ! -d build/bench/gpu ] || cp -rT build/bench/gpu "$results/gpu"
}

end() {  # status
  echo
  [ -z "$no_gpu" ] || echo "gpu run: there is no GPU here; nothing was measured"
  [ ${#failed[@]} -eq 0 ] || echo "gpu run: failed: ${failed[*]}"
  echo "gpu run: $SECONDS s; the folder to bring back is $results"
  exit "$1"
}

interrupted() {
  [ -z "$running" ] || { kill "$running"; wait "$running"; } 2>/dev/null
  row interrupted failed "$SECONDS" "what comes later was not run"
  end 130
}

export -f machine packages setup facts kernels tests bench
set -m  # else what is started here ignores SIGINT, and so do daemons that tests start
trap interrupted INT TERM HUP

step machine machine
step facts facts || [ $? -ne "$SKIPPED" ] || no_gpu=yes
step kernels kernels
step setup setup || no_setup=yes
gpu_step tests tests
for part in ${parts//,/ }; do
  gpu_step "bench_$part" bench "$part"
  [ -n "$no_setup" ] || bring
done
[ ${#failed[@]} -eq 0 ] || end 1
end 0
