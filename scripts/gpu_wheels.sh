#!/usr/bin/env bash
# Collects what a GPU machine without a package registry needs to build and test this project, into a
# folder to take there beside the sources: wheels, and the headers that the core is compiled with.
# usage: gpu_wheels.sh [FOLDER]       (default build/gpu-wheels)
# PYTHON_VERSION: that machine's Python (default 3.12). What it must have itself: a C++20 compiler, cmake,
# torch, CuPy, transformers and NumPy; those are far too large to carry.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/gpu-wheels}
version=${PYTHON_VERSION:-3.12}
python=${PYTHON:-python3}

platforms=()
for glibc in 39 35 34 31 28 27 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)

download() {  # requirements and flags of pip
  "$python" -m pip download -q --disable-pip-version-check -d "$folder" --only-binary=:all: \
    --python-version "$version" --implementation cp "${platforms[@]}" "$@"
}

# pip download keeps what an earlier run brought; two versions of one package stop an install.
rm -rf "$folder"
mkdir -p "$folder/system/include" "$folder/system/lib"
# Without what they ask for: that is in the lock, or it is the machine's.
echo "gpu wheels: requirements/gpu.txt"
download --no-deps -r requirements/gpu.txt

copy_found() {  # to, then candidates: the first that exists; none is needed where the machine has it
  local to=$1 each
  shift
  for each in "$@"; do
    if [ -e "$each" ]; then cp -r "$each" "$to/"; return; fi
  done
  echo "gpu wheels: $(basename "$1") is not here; the other machine must have it" >&2
}
include=/usr/include
copy_found "$folder/system/include" "$include/xxhash.h"
[ ! -e "$include/xxh3.h" ] || cp "$include/xxh3.h" "$folder/system/include/"
copy_found "$folder/system/include" "$include/liburing.h"
copy_found "$folder/system/include" "$include/liburing"
copy_found "$folder/system/lib" /usr/lib/x86_64-linux-gnu/liburing.a /usr/lib64/liburing.a
echo "gpu wheels: $(find "$folder" -name '*.whl' | wc -l) wheels, $(du -sh "$folder" | cut -f1), in $folder"
