"""Gathers the facts of this machine. Blocks for as long as importing the engine takes."""

from __future__ import annotations

import os
import resource
import shutil
import stat
from importlib import metadata

import kvwarehouse as kvw
from kvwarehouse_connectors.doctor.engine_process import engine_facts
from kvwarehouse_connectors.doctor.facts import DaemonFacts, Facts, HostFacts
from kvwarehouse_connectors.doctor.packages import software_facts

_CALL_TIMEOUT_S = 5.0
_SHARED_MEMORY = "/dev/shm"
_LOCAL = "unix:"


def look(address: str, engine_timeout_s: float) -> Facts:
    """address: "" for the one that the engine would use."""
    software = software_facts("vllm", "vllm.general_plugins")
    return Facts(
        software=software,
        engine=engine_facts(software, engine_timeout_s),
        host=host_facts(),
        daemon=daemon_facts(address or kvw.default_address()),
        environment=dict(os.environ),
    )


def host_facts() -> HostFacts:
    size = free = 0
    if os.path.isdir(_SHARED_MEMORY):
        usage = shutil.disk_usage(_SHARED_MEMORY)
        size, free = usage.total, usage.free
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostFacts(size, free, -1 if soft == resource.RLIM_INFINITY else soft, os.geteuid())


def daemon_facts(address: str) -> DaemonFacts:
    path = address.removeprefix(_LOCAL) if address.startswith((_LOCAL, "/")) else ""
    path = path.removeprefix("//") if path.startswith("///") else path
    exists, is_socket, owner = _socket(path)
    error, code, status = _status(address)
    return DaemonFacts(
        address=address,
        path=path,
        exists=exists,
        is_socket=is_socket,
        owner=owner,
        accessible=exists and os.access(path, os.W_OK),
        service_exists=bool(path) and os.path.exists(f"{path}.grpc"),
        error=error,
        error_code=code,
        status=status,
    )


def _socket(path: str) -> tuple[bool, bool, int]:
    """Whether it exists, is a socket, and whose it is."""
    try:
        facts = os.stat(path)
    except OSError:
        return False, False, -1
    return True, stat.S_ISSOCK(facts.st_mode), facts.st_uid


def _status(address: str) -> tuple[str, str, dict[str, object]]:
    """(what went wrong, its code, the daemon's status), by a session as an engine's: so that the
    protocol and the mapping of its memory are tried too."""
    try:
        with kvw.connect(
            address, timeout_s=_CALL_TIMEOUT_S, patience_s=0.0, read_only=True
        ) as client:
            return "", "", dict(client.status())
    except kvw.WarehouseError as error:
        return str(error), error.code, {}


def client_version() -> str:
    try:
        return metadata.version("kvwarehouse")
    except metadata.PackageNotFoundError:
        return ""
