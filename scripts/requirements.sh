#!/usr/bin/env bash
# Installs the requirements of pyproject.toml into $VENV, once per content.
# usage: requirements.sh NAME[,NAME...] [REQUIREMENT...]
# A NAME is "build", "core", or an extra; "-" stands for none. A REQUIREMENT narrows what they say.
# What earlier calls asked for is weighed with it: pip lets a later install break an earlier one.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
names=$1
shift

# Built for another torch they break `import transformers`, and nothing here needs them.
without_torch_companions() {
  local name
  for name in torchvision torchaudio torchcodec; do
    compgen -G "$VENV/lib/python3*/site-packages/$name" >/dev/null || continue
    echo "setup: removing $name"
    "$VENV/bin/python" -m pip uninstall -qq --yes "$name"
  done
}

if [ "$names" = - ]; then wanted=(); else
  mapfile -t wanted < <("$VENV/bin/python" scripts/pyproject_requirements.py "$names")
fi
wanted+=("$@")

stamp="$VENV/.kvw-requirements-$(echo "$names $*" | sha256sum | cut -c1-12)"
now=$(printf '%s\n' "${wanted[@]}")
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$now" ]; then
  without_torch_companions
  exit 0
fi

echo "setup: installing ${wanted[*]}"
rm -f "$stamp"
mapfile -t before < <(find "$VENV" -maxdepth 1 -name '.kvw-requirements-*' -exec cat {} +)
"$VENV/bin/python" -m pip install -qq "${wanted[@]}" "${before[@]}"
without_torch_companions
if broken=$("$VENV/bin/python" -m pip check); then :; else
  # SGLang and LMCache are installed without what they ask for (NAME_package.sh).
  broken=$(grep -vE '^(sglang|lmcache) |torch(vision|audio|codec)' <<<"$broken" || true)
fi
if [ -n "${broken//No broken requirements found./}" ]; then
  echo "setup: what is installed in $VENV does not fit together:" >&2
  echo "$broken" >&2
  exit 1
fi
echo "$now" >"$stamp"
