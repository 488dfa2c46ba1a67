#!/usr/bin/env bash
# Makes the virtual environment and installs the project into it, editable: see CONTRIBUTING.md.
# usage: setup.sh EXTRA... [-- REQUIREMENT...]
# A REQUIREMENT is installed in the same step, so that pip weighs all of them together. BUILD is the
# native build's directory: virtual environments must not share one.
# Safe to repeat: each step compares what it depends on with what it left in $VENV the last time.
set -euo pipefail
cd "$(dirname "$0")/.."
export VENV=${VENV:-.venv}
python=${PYTHON:-python3}
build=${BUILD:-build/editable}
extras=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do extras+=("$1"); shift; done
[ $# -eq 0 ] || shift

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

make_venv() {
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || fail \
    "$python is $("$python" --version 2>&1 || true); kvwarehouse needs Python 3.11 or newer." \
    "Name one: make PYTHON=python3.12 ..."
  [ -f "$VENV/.kvw-made" ] && [ -x "$VENV/bin/python" ] && return
  say "making $VENV with $("$python" --version)"
  rm -rf "$VENV"
  "$python" -m venv "$VENV" || fail "cannot make a virtual environment;" \
    "on Debian and Ubuntu: apt-get install python3-venv python3-dev"
  touch "$VENV/.kvw-made"
}

# Everything the native build depends on. Names are part of it, so that removed files count.
native_fingerprint() {
  { pwd; "$VENV/bin/python" -VV; cat pyproject.toml
    find native -type f \( -name '*.cc' -o -name '*.h' -o -name '*.cmake' -o -name CMakeLists.txt \) \
      -not -path 'native/tests/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
  } | sha256sum
}

build_tools() {
  # Wheels of cmake and ninja serve where the system has none, or too old ones.
  local missing=()
  cmake --version 2>/dev/null | "$VENV/bin/python" -c '
import re, sys
found = re.search(r"version (\d+)\.(\d+)", sys.stdin.read())
sys.exit(not found or tuple(map(int, found.groups())) < (3, 24))' || missing+=(cmake)
  command -v ninja >/dev/null || missing+=(ninja)
  [ ${#missing[@]} -eq 0 ] || scripts/requirements.sh - "${missing[@]}"
}

install_project() {
  local stamp="$VENV/.kvw-native" now
  now=$(native_fingerprint)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$now" ] && return
  say "building the native core (first time: about a minute)"
  rm -f "$stamp"
  local log="$VENV/.kvw-build.log"
  if ! PATH="$PWD/$VENV/bin:$PATH" "$VENV/bin/python" -m pip install --no-deps \
    --no-build-isolation --config-settings="build-dir=$build" --editable . >"$log" 2>&1; then
    cat "$log" >&2
    fail "the build failed, see above"
  fi
  echo "$now" >"$stamp"
}

make_venv
scripts/system_packages.sh
scripts/requirements.sh "build,core,$(IFS=,; echo "${extras[*]}")" "$@"
build_tools
install_project
