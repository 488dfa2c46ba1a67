#!/usr/bin/env bash
# Packs what a GPU machine without a network needs into one file: the sources of HEAD with the
# programs to run there, and the wheels and headers of gpu_wheels.sh. usage: gpu_kit.sh
# PYTHON_VERSION: that machine's Python (default 3.12). What is not committed is not packed.
set -euo pipefail
cd "$(dirname "$0")/.."
kit=build/gpu-kit.tar.gz
most_bytes=$((40 * 1000 * 1000))  # what can be carried to a machine that takes no more

changed=$(git status --porcelain)
[ -z "$changed" ] || { echo "gpu kit: what is not committed is not packed:"; echo "$changed"; } >&2

# In build/, where a rename is one step: no half of a kit has its name.
mkdir -p build
making=$(mktemp -d build/gpu-kit.XXXXXX)
trap 'rm -rf "$making"' EXIT
rm -f "$kit"
git archive --prefix=kvwarehouse/ HEAD | tar xf - -C "$making"
scripts/gpu_wheels.sh "$making/kvwarehouse/build/gpu-wheels"
git log -1 --format='%H %cs %s' >"$making/kvwarehouse/build/gpu-kit.commit"
tar czf "$making/kit" --owner=0 --group=0 --numeric-owner -C "$making" kvwarehouse

bytes=$(stat -c %s "$making/kit")
if [ "$bytes" -gt "$most_bytes" ]; then
  echo "gpu kit: it would have $bytes bytes, more than $most_bytes: what became larger?" >&2
  du -ah "$making/kvwarehouse" | sort -rh | head -n 12 >&2
  exit 1
fi
mv "$making/kit" "$kit"
cat <<END
gpu kit: $((bytes / 1000000)) MB in $kit, for Python ${PYTHON_VERSION:-3.12}. On the GPU machine:
    tar xzf gpu-kit.tar.gz
    kvwarehouse/scripts/gpu_run.sh [RESULTS_FOLDER]
END
