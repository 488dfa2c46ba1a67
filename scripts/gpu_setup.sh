#!/usr/bin/env bash
# Makes $VENV on a machine with a GPU: over that Python's own packages (torch, CuPy and transformers, which
# are its machine's to choose), with the project, its daemon, kvikio, and the tests' tools.
# usage: gpu_setup.sh
# WHEELS: a folder of gpu_wheels.sh; where it exists no registry is asked for anything.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv-gpu}
python=${PYTHON:-python3}
wheels=${WHEELS:-build/gpu-wheels}

say() { echo "gpu setup: $*"; }

from=()
if [ -d "$wheels" ]; then
  from=(--no-index --find-links "$wheels")
  # Headers that were carried come after those of the system.
  export CMAKE_PREFIX_PATH="${CMAKE_PREFIX_PATH:+$CMAKE_PREFIX_PATH:}$(realpath "$wheels")/system"
fi

if [ ! -x "$venv/bin/python" ] || [ ! -f "$venv/.kvw-made" ]; then
  say "making $venv with $("$python" --version)"
  rm -rf "$venv"
  # Debian's Python has no ensurepip without python3-venv.
  if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$venv"
  else
    "$python" -m venv --without-pip "$venv"
  fi
  # That Python may be a virtual environment's, whose packages --system-site-packages does not reach.
  "$python" -c 'import site, sys; print(*[p for p in sys.path if p in site.getsitepackages()], sep="\n")' \
    >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/over.pth"
  touch "$venv/.kvw-made"
fi

pip() {
  if [ -x "$venv/bin/pip" ]; then
    "$venv/bin/python" -m pip "$@" -q --disable-pip-version-check
  else  # that Python's own pip serves this one too, from 22.3 on
    "$python" -m pip --python "$venv/bin/python" "$@" -q --disable-pip-version-check
  fi
}

# Into this environment, whatever the one below has: kvikio looks for cuFile beside itself. The lock
# has all of it but what is the machine's: NumPy, CuPy, torch.
install_requirements() {
  say "installing requirements/gpu.txt"
  pip install "${from[@]}" --no-deps --ignore-installed -r requirements/gpu.txt
}

stamp="$venv/.kvw-gpu"
carried=$([ ! -d "$wheels" ] || find "$wheels" -name '*.whl' | sort)
now=$({ cat pyproject.toml requirements/gpu.txt; echo "$carried"; } | sha256sum)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$now" ] || install_requirements
echo "$now" >"$stamp"

say "building the native core"
log="$venv/.kvw-build.log"
if ! PATH="$PWD/$venv/bin:$PATH" pip install --no-deps --no-build-isolation "${from[@]}" \
  --config-settings=build-dir=build/gpu --editable . >"$log" 2>&1; then
  cat "$log" >&2
  say "the build failed, see above" >&2
  exit 1
fi
