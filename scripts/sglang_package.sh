#!/usr/bin/env bash
# SGLang itself, without what it asks for: most of that is for GPUs, and it wants another torch than
# the one for the CPU that is here. What its controllers, pools and factory import stands below.
# usage: sglang_package.sh sglang==VERSION
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv-sglang}
stamp="$VENV/.kvw-sglang"
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$1" ] && exit 0
echo "setup: installing $1 alone"
"$VENV/bin/python" -m pip install -qq --no-deps "$1"
echo "$1" >"$stamp"
