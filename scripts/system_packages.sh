#!/usr/bin/env bash
# What the build needs from the system: a C++20 compiler, xxhash.h (both needed), liburing (used if
# there). Missing ones are installed by apt as root or with sudo; otherwise the command is printed. On
# a terminal it asks first; with KVW_NO_APT=1 it installs nothing, and prints the command.
# Then ccache, with which a second clone compiles nothing again, and programs that single tests use:
# fio, openssl, strace. They are tried once for each clone and never ask for a password; without them
# those tests are skipped, and say so. Prometheus, with which others check deploy/, is unpacked only.
# EXTRA=fuzz: a clang with libFuzzer instead, used if there. EXTRA=sglang: instead what SGLang
# compiles its page hash with. EXTRA=ceph: a Ceph cluster with an S3 gateway, used if there.
# EXTRA=busy: stress-ng, which keeps cores busy beside a run of the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=${CXX:-c++}

compiles() {  # the code on stdin
  "$compiler" -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1
}

has_libfuzzer() {
  local clang
  for clang in clang++ clang++-{20..14}; do
    echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
      "$clang" -fsanitize=fuzzer,address -x c++ -o /dev/null - >/dev/null 2>&1 && return
  done
  return 1
}

missing() {
  packages=()
  if [ "${EXTRA:-}" = fuzz ]; then
    has_libfuzzer || packages+=("clang-${CLANG:-14}" "libclang-rt-${CLANG:-14}-dev")
    return
  fi
  if [ "${EXTRA:-}" = sglang ]; then
    echo '#include <openssl/sha.h>' | compiles || packages+=(libssl-dev)
    return
  fi
  if [ "${EXTRA:-}" = ceph ]; then
    local program
    for program in ceph-mon ceph-mgr ceph-osd radosgw; do
      command -v "$program" >/dev/null || packages+=("$program")
    done
    return
  fi
  if [ "${EXTRA:-}" = busy ]; then
    command -v stress-ng >/dev/null || packages+=(stress-ng)
    return
  fi
  if ! echo 'int main() {}' | compiles; then
    packages+=(g++)
    # Without a compiler there is no telling what else is there; apt leaves alone what is.
    packages+=(libxxhash-dev liburing-dev)
    return
  fi
  echo '#include <xxhash.h>' | compiles || packages+=(libxxhash-dev)
  echo '#include <liburing.h>' | compiles || packages+=(liburing-dev)
}

missing_programs() {
  packages=()
  local program
  for program in ccache fio openssl strace; do
    command -v "$program" >/dev/null || packages+=("$program")
  done
}

somebody_is_there() {
  [ -t 0 ] && [ -z "${CI:-}" ]
}

as_root() {
  if [ "$(id -u)" -eq 0 ]; then
    "$@"
  elif somebody_is_there && [ -z "${never_ask:-}" ]; then
    sudo "$@"
  else
    sudo -n "$@"
  fi
}

by_hand() {
  local sudo_word
  sudo_word=$([ "$(id -u)" -eq 0 ] || echo "sudo ")
  echo "    ${sudo_word}apt-get update && ${sudo_word}apt-get install -y $*"
}

agreed() {
  local answer=yes
  echo "setup: installing the system packages ${packages[*]}, as with"
  by_hand "${packages[@]}"
  if somebody_is_there; then
    # At the terminal itself: what is said here may go to a file, and nobody would know of it.
    echo -n "setup: install ${packages[*]}? [Y/n] " >&0 || return 1
    read -r answer || return 1
  fi
  case "$answer" in "" | [Yy]*) ;; *) return 1 ;; esac
}

install() {
  [ -z "${KVW_NO_APT:-}" ] || return 1
  command -v apt-get >/dev/null || return 1
  [ "$(id -u)" -eq 0 ] || command -v sudo >/dev/null || return 1
  agreed || return 1
  local apt=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends)
  as_root "${apt[@]}" "${packages[@]}" >/dev/null 2>&1 && return
  as_root apt-get update -qq >/dev/null 2>&1 || true  # package lists may be absent or old
  as_root "${apt[@]}" "${packages[@]}" >/dev/null
}

install_programs() {
  local tried="build/programs" never_ask=1
  missing_programs
  [ ${#packages[@]} -eq 0 ] && return
  [ -f "$tried" ] && [ "$(cat "$tried")" = "${packages[*]}" ] && return
  install || true
  missing_programs
  [ ${#packages[@]} -eq 0 ] && return
  echo "setup: going on without ${packages[*]}: tests that use one of them are skipped. Later:" >&2
  by_hand "${packages[@]}" >&2
  mkdir -p build
  echo "${packages[*]}" >"$tried"
}

# Its package would start a service that listens on all addresses, so it is not installed: the two
# programs go to what clones share. Tried once for each clone.
unpack_prometheus() {
  local kept="${XDG_CACHE_HOME:-${HOME:-}/.cache}/kvwarehouse/prometheus" tried="build/prometheus"
  command -v promtool >/dev/null && command -v prometheus >/dev/null && return
  [ -x "$kept/promtool" ] || [ -f "$tried" ] && return
  if [ -z "${KVW_NO_APT:-}" ] && command -v dpkg-deb >/dev/null; then
    echo "setup: unpacking the package prometheus into $kept, for the tests of deploy/"
    fetch_prometheus "$kept" && return
  fi
  echo "setup: going on without prometheus and promtool: tests that use them are skipped" >&2
  mkdir -p build
  echo tried >"$tried"
}

fetch_prometheus() {
  local kept=$1 scratch status=0
  mkdir -p "$kept" && scratch=$(mktemp -d "$kept/new.XXXXXX") || return 1
  (
    cd "$scratch" || exit 1
    apt-get download -qq prometheus >/dev/null 2>&1 ||
      { never_ask=1 as_root apt-get update -qq && apt-get download -qq prometheus; } >/dev/null 2>&1
    # promtool last: it says that both are there.
    dpkg-deb -x prometheus_*.deb . && mv usr/bin/prometheus usr/bin/promtool "$kept"
  ) || status=1
  rm -rf "$scratch"
  return "$status"
}

say_what_is_missing() {
  echo "setup: not installed: ${packages[*]}. Install them with" >&2
  by_hand "${wanted[@]}" >&2
  if [ "${EXTRA:-}" = fuzz ]; then
    echo "or another clang with libFuzzer. Going on without: make fuzz changes inputs blindly" >&2
    return
  fi
  if [ "${EXTRA:-}" = ceph ]; then
    echo "Going on without: the tests of real stores are skipped" >&2
    return
  fi
  [ "${EXTRA:-}" != busy ] || return 1
  echo "or, on other systems, a C++20 compiler, the headers of xxHash and those of liburing." >&2
  [ "${packages[*]}" = liburing-dev ] || return 1
  echo "setup: going on without liburing: NVMe I/O will use the pread pool" >&2
}

missing
wanted=("${packages[@]}")
if [ ${#wanted[@]} -gt 0 ]; then
  install || true
  missing
  [ ${#packages[@]} -eq 0 ] || say_what_is_missing || exit 1
fi
[ -n "${EXTRA:-}" ] || { install_programs; unpack_prometheus; }
