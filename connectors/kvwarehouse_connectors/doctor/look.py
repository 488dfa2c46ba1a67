"""Gathers the facts of this machine. Blocks for as long as importing the engine takes."""

from __future__ import annotations

import os
import resource
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import kvwarehouse as kvw
from kvwarehouse_connectors.doctor.configuration import config_facts
from kvwarehouse_connectors.doctor.engine_process import engine_facts, probe
from kvwarehouse_connectors.doctor.engines import engine_of
from kvwarehouse_connectors.doctor.facts import DaemonFacts, Facts, HostFacts
from kvwarehouse_connectors.doctor.limits import Tiers, directories_of, pid_at
from kvwarehouse_connectors.doctor.packages import software_facts
from kvwarehouse_connectors.doctor.pages import page_facts

_CALL_TIMEOUT_S = 5.0
_SHARED_MEMORY = "/dev/shm"
_MEMORY = "/proc/meminfo"
_LOCAL = "unix:"


@dataclass(frozen=True)
class Asked:
    """What the doctor was given besides the engine's name."""

    address: str = ""
    """"" for the one that the engine would use."""
    config: str = ""
    """As configuration.py takes it."""
    model: str = ""
    page_tokens: int = 0
    """0: as the engine has them."""
    kv_dtype: str = ""
    engine_timeout_s: float = 180.0
    command: tuple[str, ...] = ()
    """Arguments of `vllm serve`, to be judged; () for none."""


def look(name: str, asked: Asked) -> Facts:
    """name: one of engines.ENGINES."""
    engine = engine_of(name)
    given = asked.config or option_of(asked.command, engine.SERVED.config_option)
    served, config = engine.SERVED, config_facts(given)
    settings = engine.settings_of(config.values, os.environ)
    found = engine_facts(probe(name, asked.command), asked.engine_timeout_s)
    page_tokens = (
        asked.page_tokens
        or found.command_block_tokens
        or engine.page_tokens_of(config.values)
        or served.page_tokens_on(found.device)
    )
    return Facts(
        software=software_facts(served.module, served.plugin_group),
        engine=found,
        host=host_facts(),
        daemon=daemon_facts(asked.address or settings.address or kvw.default_address()),
        environment=dict(os.environ),
        config=config,
        settings=settings,
        command=asked.command,
        page=page_facts(asked.model, page_tokens, asked.kv_dtype),
    )


def running_tiers(address: str) -> tuple[DaemonFacts, Tiers]:
    """The daemon at an address ("" for the one that commands find by themselves), and what it has;
    an empty Tiers where none runs. One that does not answer is known by its process alone."""
    daemon = daemon_facts(address or kvw.default_address())
    pid = pid_at(daemon.path) if daemon.is_socket else 0
    arena, nvme = directories_of(pid) if pid else ("", "")
    core = cast(Mapping[str, Any], daemon.status).get("core", {})
    capacities = {
        name: tier.get("capacity_bytes", 0) for name, tier in core.get("tiers", {}).items()
    }
    return daemon, Tiers(
        dram_bytes=int(capacities.get("dram", 0)),
        nvme_bytes=int(capacities.get("nvme", 0)),
        arena_dir=arena,
        nvme_dir=nvme,
        pid=pid,
    )


def option_of(command: Sequence[str], option: str) -> str:
    """The value that a command line gives an option; "" for none."""
    for word, following in zip(command, (*command[1:], ""), strict=False):
        name, has_value, value = word.partition("=")
        if name.replace("_", "-") == option:
            return value if has_value else following
    return ""


def host_facts() -> HostFacts:
    size = free = 0
    if os.path.isdir(_SHARED_MEMORY):
        usage = shutil.disk_usage(_SHARED_MEMORY)
        size, free = usage.total, usage.free
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostFacts(
        _available_bytes(), size, free, -1 if soft == resource.RLIM_INFINITY else soft, os.geteuid()
    )


def _available_bytes() -> int:
    try:
        with open(_MEMORY, encoding="ascii") as lines:
            found = next(line for line in lines if line.startswith("MemAvailable:"))
            return int(found.split()[1]) * 1024
    except (OSError, StopIteration):
        return 0


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
