#!/usr/bin/env bash
# An engine's package without what it asks for: for SGLang and LMCache most of that is for GPUs, and
# of another torch than the one for the CPU that is here. What their parts import on a CPU, which is
# less, was installed before, with this project.
# usage: VENV=FOLDER package_alone.sh NAME==VERSION
set -euo pipefail
cd "$(dirname "$0")/.."
: "${VENV:?give the environment to install it into}"
stamp="$VENV/.kvw-${1%%==*}"
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$1" ] && exit 0
echo "setup: installing $1 alone"
"$VENV/bin/python" -m pip install -qq --no-deps "$1"
echo "$1" >"$stamp"
