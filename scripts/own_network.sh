#!/usr/bin/env bash
# Runs a command in a network namespace of its own, with nothing but loopback in it: for programs
# that listen on all addresses and cannot be told otherwise. KVW_TEST_OWN_NETWORK=1 says so inside.
# usage: own_network.sh COMMAND...
# Where the kernel does not permit it the command runs without, and the variable is not set.
set -euo pipefail
# SIOCSIFFLAGS: up and running. Not every machine has the `ip` command.
up='import fcntl, socket, struct
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))'
for way in --net --map-root-user; do
  if unshare --net $way true 2>/dev/null; then
    exec unshare --net $way env KVW_TEST_OWN_NETWORK=1 bash -c 'python3 -c "$0" && exec "$@"' "$up" "$@"
  fi
done
exec "$@"
