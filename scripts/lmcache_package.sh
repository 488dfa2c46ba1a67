#!/usr/bin/env bash
# LMCache itself, without what it asks for: CUDA's Python packages and a cloud's client are part of
# that. What it imports on a CPU was installed before, with this project.
# usage: lmcache_package.sh lmcache==VERSION
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv-lmcache}
stamp="$VENV/.kvw-lmcache"
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$1" ] && exit 0
echo "setup: installing $1 alone"
"$VENV/bin/python" -m pip install -qq --no-deps "$1"
echo "$1" >"$stamp"
