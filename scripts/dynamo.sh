#!/usr/bin/env bash
# An environment with Dynamo's runtime, whose KV indexer the tests run; nothing of this project is
# in it. usage: dynamo.sh REQUIREMENT (VENV: where)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ ! -x "$VENV/bin/python" ] || [ ! -f "$VENV/.kvw-made" ]; then
  rm -rf "$VENV"
  "$python" -m venv "$VENV"
  touch "$VENV/.kvw-made"
fi
scripts/requirements.sh - "$@"
