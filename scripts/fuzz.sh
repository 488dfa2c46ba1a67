#!/usr/bin/env bash
# Builds the fuzz targets of native/fuzz in build/fuzz and runs each for FUZZ_S seconds over its
# corpus, then those of tests/support/testkit/fuzz.py. With clang: libFuzzer, AddressSanitizer and UBSan. With
# another compiler, or without atheris, the same targets over blindly changed inputs.
# usage: fuzz.sh [NAME...]
# An input that ends a target is left in build/fuzz/findings: fix what it found, and keep it in
# tests/fuzz/corpus. KVW_SEED repeats a blind run.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/${VENV:-.venv}
seconds=${FUZZ_S:-30}
build=$PWD/build/fuzz
export PATH="$venv/bin:$PATH"
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=0:strict_string_checks=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}

names=("$@")
if [ ${#names[@]} -eq 0 ]; then
  mapfile -t names < <(find tests/fuzz/corpus -mindepth 1 -maxdepth 1 -type d -printf '%f\n' | sort)
fi
native=()
for name in "${names[@]}"; do
  [ ! -f "native/fuzz/$name.cc" ] || native+=("fuzz_$name")
done

make_native() {
  local clang compiler=()
  for clang in clang++ clang++-{20..14}; do
    command -v "$clang" >/dev/null || continue
    # Its runtime library is a package of its own.
    echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
      "$clang" -fsanitize=fuzzer,address -x c++ -o /dev/null - 2>/dev/null || continue
    compiler=(-DCMAKE_CXX_COMPILER="$clang")
    break
  done
  [ ${#compiler[@]} -gt 0 ] ||
    echo "fuzz: no clang with libFuzzer (make setup-fuzz): inputs are changed blindly"
  cmake -S native -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DKVW_SANITIZE=address \
    -DKVW_BUILD_MODULE=OFF -DKVW_BUILD_FUZZ=ON "${compiler[@]}" >/dev/null
  cmake --build "$build" --target "${native[@]}" -j "${JOBS:-2}"
}
[ ${#native[@]} -eq 0 ] || make_native

mkdir -p "$build/findings"
scratch=$(mktemp -d /dev/shm/kvw-fuzz-XXXXXX)
trap 'rm -rf "$scratch"' EXIT

# Runs are hostile inputs, counted as in tests/support/testkit/tally.py. A target's output on stdin, in
# our words, atheris's or those of libFuzzer's statistics; its class.
counted() {
  local class=$1 line runs=0
  while IFS= read -r line; do
    if [[ $line =~ ^(Done\ |stat::number_of_executed_units:\ )([0-9]+) ]]; then
      runs=${BASH_REMATCH[2]}
    elif [[ ! $line =~ ^stat:: ]]; then
      echo "$line"
    fi
  done
  echo "fuzz: $class, $runs runs"
  [ "$runs" -eq 0 ] || [ -z "${KVW_TALLY:-}" ] ||
    echo "{\"hostile input: $class\": $runs}" >"$KVW_TALLY/fuzz-$class-$$-$RANDOM.tally"
}

for name in "${names[@]}"; do
  corpus=tests/fuzz/corpus/$name
  # What is found to be worth keeping goes here; the project's own corpus is only read.
  mkdir -p "$build/corpus/$name"
  if [ -f "native/fuzz/$name.cc" ]; then
    echo "fuzz: $name, $seconds s"
    KVW_TEST_SHM=$scratch "$build/fuzz_$name" -max_total_time="$seconds" -max_len=4096 -timeout=60 -rss_limit_mb=4096 \
      -seed="${KVW_SEED:-1}" -verbosity=0 -print_final_stats=1 -artifact_prefix="$build/findings/$name-" \
      "$build/corpus/$name" "$corpus" 2>&1 | counted "$name"
  else
    echo "fuzz: $name, $seconds s, Python"
    PYTHONPATH=tests/support TMPDIR=$scratch python -P -m testkit.fuzz "$name" "$seconds" "$build/findings/$name-" \
      "$build/corpus/$name" "$corpus" 2>&1 | counted Python
  fi
done
