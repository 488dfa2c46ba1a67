#!/usr/bin/env bash
# Installs the requirements of pyproject.toml into $VENV, once per content.
# usage: requirements.sh NAME[,NAME...] [REQUIREMENT...]
# A NAME is "build", "core", or an extra; "-" stands for none. A REQUIREMENT narrows what they say.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
names=$1
shift

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
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$now" ] && exit 0

echo "setup: installing ${wanted[*]}"
rm -f "$stamp"
"$VENV/bin/python" -m pip install -qq "${wanted[@]}"
# A torchvision built for another torch breaks `import transformers`; nothing here needs one.
case " ${wanted[*]}" in
  *" torch"*) "$VENV/bin/python" -m pip uninstall -qq --yes torchvision ;;
esac
echo "$now" >"$stamp"
