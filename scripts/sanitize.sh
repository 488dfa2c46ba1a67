#!/usr/bin/env bash
# Builds the core with a sanitizer, in a build folder of its own, and runs the native tests under
# it; with `address` also the Python tests marked `concurrency`.
# usage: sanitize.sh address|thread
# KVW_SEED repeats a run. What ThreadSanitizer cannot see: races between processes, and fences
# (its build uses acquire and release accesses instead, see native/base/atomics.h).
set -euo pipefail
cd "$(dirname "$0")/.."
kind=$1
venv=$PWD/${VENV:-.venv}
build=$PWD/build/$kind
export PATH="$venv/bin:$PATH"
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1:strict_string_checks=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
# A client leaves the thread that registers behind when the process ends. A bus error of a process
# that does not handle it is to end it, as a test checks.
export TSAN_OPTIONS=${TSAN_OPTIONS:-second_deadlock_stack=1:die_after_fork=0:report_thread_leaks=0:handle_sigbus=0:suppressions=$PWD/native/tests/tsan.supp}

module=OFF
[ "$kind" = address ] && module=ON
cmake -S native -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DKVW_SANITIZE="$kind" \
  -DKVW_BUILD_TESTS=ON -DKVW_BUILD_MODULE=$module -DPython_EXECUTABLE="$venv/bin/python" >/dev/null
cmake --build "$build" --target native_tests -j "${JOBS:-2}"

# Sanitizers map fixed addresses, which randomised layouts of newer kernels can occupy.
layout=()
setarch -R true 2>/dev/null && layout=(setarch -R)
native() { "${layout[@]}" ctest --test-dir "$build" --output-on-failure --no-tests=ignore -j 2 "$@"; }

if [ "$kind" = thread ]; then
  native --exclude-regex '^gpu_'
  # ThreadSanitizer does not follow forks of a process that has had threads, and those of the model
  # of a GPU outlive their test: each of these tests has a process of its own.
  status=0
  for program in "$build"/gpu_*_test; do
    for test in $("$program" --list); do
      "${layout[@]}" timeout 300 "$program" --filter "$test" >"$build/alone.log" 2>&1 || {
        cat "$build/alone.log"
        status=1
      }
    done
    echo "${program##*/}: $("$program" --list | wc -l) tests, each in a process of its own"
  done
  exit $status
fi
native
cmake --build "$build" -j "${JOBS:-2}"

# A plain installation of this build, used by the interpreter behind the virtual environment: the
# environment's own would import the editable installation. -S keeps its packages out.
site=$build/site
rm -rf "$site"
mkdir -p "$site"
cp -r kvwarehouse "$site/kvwarehouse"
cp -r connectors/kvwarehouse_connectors bench/kvwarehouse_bench "$site"
cmake --install "$build" --prefix "$site" >/dev/null
read -r python packages < <("$venv/bin/python" -c '
import sys, sysconfig
print(sys._base_executable, sysconfig.get_path("purelib"))')
compiler=${CXX:-c++}
status=0
# Programs of bench/ that are no part of a distribution come last.
env PYTHONSAFEPATH=1 PYTHONPATH="$site:$packages:$PWD/bench" ASAN_OPTIONS="$ASAN_OPTIONS:detect_leaks=0" \
  LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libstdc++.so)" \
  "${layout[@]}" "$python" -S -m pytest -m concurrency tests \
  --ignore=tests/engines --ignore=tests/gpu || status=$?
if [ $status -eq 5 ]; then
  echo "sanitize: no Python test is marked concurrency"
  exit 0
fi
exit $status
