#!/usr/bin/env bash
# What `make bench-peers` is run beside, besides vLLM (make setup-vllm): the environments of the peers
# that are Python packages, from their locks, and Redis out of the distribution's packages, unpacked in
# .venv-peers and not installed.
# A peer that cannot be had is none of this script's business to fail for: it leaves NAME.failed with
# the reason, which the benchmark shows. Safe to repeat; what failed is tried again.
set -euo pipefail
cd "$(dirname "$0")/.."
peers=.venv-peers
python=${PYTHON:-python3}

say() { echo "setup: $*"; }

# bring NAME FAILED COMMAND...: the command's output is the reason, kept in FAILED.
bring() {
  local name=$1 failed=$2 log="$peers/$1.log"
  shift 2
  rm -f "$failed"
  "$@" >"$log" 2>&1 && return
  [ -s "$log" ] || echo "its installation failed without a word" >"$log"
  tail -n 3 "$log" >"$failed"
  say "$name cannot be had here, the benchmark goes on without: $(tail -n 1 "$log")"
}

unpack_redis() (  # in a shell of its own, for it changes folders
  [ ! -x "$peers/redis/usr/bin/redis-server" ] || return 0
  if command -v valkey-server redis-server; then return; fi
  if ! command -v apt-get || ! command -v dpkg; then
    echo "no valkey-server or redis-server on the PATH, and no apt-get to bring one"
    return 1
  fi
  mkdir -p "$peers/redis"
  cd "$peers/redis" || return 1
  packages=(redis-server redis-tools liblzf1 libjemalloc2 libatomic1)
  apt-get download "${packages[@]}" ||
    { apt-get update -qq && apt-get download "${packages[@]}"; } || return 1
  for package in *.deb; do dpkg -x "$package" . || return 1; done
  rm -f ./*.deb
)

mkdir -p "$peers"
bring mooncake "$peers/mooncake.failed" "$python" scripts/setup.py mooncake
bring lmcache .venv-lmcache.failed "$python" scripts/setup.py lmcache
bring redis "$peers/redis.failed" unpack_redis
