#!/usr/bin/env bash
# Installs the requirements of pyproject.toml into $VENV, once per content.
# usage: requirements.sh NAME[,NAME...] [REQUIREMENT...]
# A NAME is "build", "core", or an extra; "-" stands for none. A REQUIREMENT narrows what they say.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
names=$1
shift

# A torchvision built for another torch breaks `import transformers`, and nothing here needs one.
without_torchvision() {
  compgen -G "$VENV/lib/python3*/site-packages/torchvision" >/dev/null || return 0
  echo "setup: removing torchvision"
  "$VENV/bin/python" -m pip uninstall -qq --yes torchvision
}

if [ "$names" = - ]; then wanted=(); else
  mapfile -t wanted < <("$VENV/bin/python" - "$names" <<'PYTHON'
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())
known = dict(project["project"]["optional-dependencies"])
known["build"] = project["build-system"]["requires"]
known["core"] = project["project"]["dependencies"]
print(*[line for name in sys.argv[1].split(",") for line in known[name]], sep="\n")
PYTHON
  )
fi
wanted+=("$@")

stamp="$VENV/.kvw-requirements-$(echo "$names $*" | sha256sum | cut -c1-12)"
now=$(printf '%s\n' "${wanted[@]}")
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$now" ]; then
  without_torchvision
  exit 0
fi

echo "setup: installing ${wanted[*]}"
rm -f "$stamp"
"$VENV/bin/python" -m pip install -qq "${wanted[@]}"
without_torchvision
echo "$now" >"$stamp"
