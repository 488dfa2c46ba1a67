#!/usr/bin/env bash
# Runs .ci/run as continuous integration does: in a fresh clone of HEAD, in build/ci, without what is
# not committed. When it passed, build/ci.passed has the commit's id. usage: ci.sh
set -euo pipefail
cd "$(dirname "$0")/.."
commit=$(git rev-parse HEAD)
clone=build/ci/main
if [ -n "$(git status --porcelain)" ]; then
  echo "ci: what is not committed is no part of this run:"
  git status --short
fi
rm -rf build/ci build/ci.passed
git clone --quiet . "$clone"
# The folder of notes beside a checkout, where there is one.
[ ! -e ../shared ] || ln -s "$(realpath ../shared)" build/ci/shared
started=$SECONDS
# A make above this one would hand its own flags on.
env -u MAKEFLAGS -u MAKELEVEL -u KVW_SEED bash "$clone/.ci/run"
echo "$commit" >build/ci.passed
rm -rf build/ci
echo "ci: ${commit:0:9} passed in $((SECONDS - started)) s"
