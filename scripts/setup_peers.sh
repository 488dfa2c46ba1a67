#!/usr/bin/env bash
# What `make bench-peers` is run beside: an environment each for the peers that are Python packages,
# below $PEERS, and Redis out of the distribution's packages, unpacked there and not installed.
# A peer that cannot be had is none of this script's business to fail for: it leaves NAME.failed with
# the reason, which the benchmark shows. Safe to repeat; what failed is tried again.
set -euo pipefail
cd "$(dirname "$0")/.."
peers=${PEERS:-.venv-peers}
python=${PYTHON:-python3}

mooncake=('mooncake-transfer-engine-non-cuda==0.3.13.post1' 'numpy<=2.2.6')
lmcache=('lmcache==0.5.6')
# What LMCache asks for, less what is for GPUs and clouds alone: it runs on a CPU without.
lmcache_needs=(
  'torch==2.13.0' aiofile aiofiles aiohttp awscrt blake3 cachetools cryptography fastapi
  'grpcio>=1.78.0' 'grpcio-observability==1.78.0' httptools httpx 'huggingface_hub>=1.5.0' msgspec
  numba 'numpy<=2.2.6' nvtx 'opentelemetry-api<=1.40.0' opentelemetry-exporter-otlp
  'opentelemetry-exporter-prometheus<=0.61b0' opentelemetry-sdk 'prometheus_client<=0.24.1'
  'protobuf>=6.31.1,<7' psutil py-cpuinfo pyyaml pyzmq redis safetensors 'setuptools>=77.0.3,<81'
  sortedcontainers 'transformers>=5.4' uvicorn
)

say() { echo "setup: $*"; }

# once NAME WHAT FUNCTION: unless it was done with this content. FUNCTION's output is the reason.
once() {
  local name=$1 what=$2 stamp="$peers/.kvw-$1" log="$peers/$1.log"
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$what" ] && return
  say "$name, to be compared with"
  rm -rf "${peers:?}/$name" "$stamp" "$peers/$name.failed"
  if "$3" >"$log" 2>&1; then
    echo "$what" >"$stamp"
    return
  fi
  [ -s "$log" ] || echo "its installation failed without a word" >"$log"
  tail -n 3 "$log" >"$peers/$name.failed"
  say "$name cannot be had here, the benchmark goes on without: $(tail -n 1 "$log")"
}

environment() {  # NAME REQUIREMENT...
  local at="$peers/$1"
  shift
  "$python" -m venv "$at" && "$at/bin/python" -m pip install -qq "$@"
}

make_mooncake() { environment mooncake "${mooncake[@]}"; }

make_lmcache() {
  environment lmcache "${lmcache_needs[@]}" &&
    "$peers/lmcache/bin/python" -m pip install -qq --no-deps "${lmcache[@]}"
}

make_redis() (  # in a shell of its own, for it changes folders
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
once mooncake "${mooncake[*]}" make_mooncake
once lmcache "${lmcache[*]} ${lmcache_needs[*]}" make_lmcache
once redis "packages of the distribution" make_redis
