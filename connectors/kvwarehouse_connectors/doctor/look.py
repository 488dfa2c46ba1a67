"""Gathers the facts of this machine. Blocks for as long as importing the engine takes."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

import kvwarehouse as kvw
from kvwarehouse.host import Tiers, available_bytes, host_limits
from kvwarehouse_connectors.doctor.configuration import config_facts
from kvwarehouse_connectors.doctor.engine_process import engine_facts, probe
from kvwarehouse_connectors.doctor.engines import engine_of
from kvwarehouse_connectors.doctor.facts import DaemonFacts, Facts, HostFacts
from kvwarehouse_connectors.doctor.packages import software_facts
from kvwarehouse_connectors.doctor.pages import page_facts

_CALL_TIMEOUT_S = 5.0
_SHARED_MEMORY = "/dev/shm"
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
        page=page_facts(asked.model, page_tokens, asked.kv_dtype, found),
    )


def option_of(command: Sequence[str], option: str) -> str:
    """The value that a command line gives an option; "" for none."""
    for word, following in zip(command, (*command[1:], ""), strict=False):
        name, has_value, value = word.partition("=")
        if name.replace("_", "-") == option:
            return value if has_value else following
    return ""


def host_facts() -> HostFacts:
    limits = host_limits(Tiers(arena_dir=_SHARED_MEMORY))
    exists = os.path.isdir(_SHARED_MEMORY)
    return HostFacts(
        available_bytes=available_bytes(),
        shm_bytes=limits.arena.total_bytes if exists else 0,
        shm_free_bytes=limits.arena.free_bytes if exists else 0,
        memlock_bytes=limits.memlock_bytes,
        user=os.geteuid(),
    )


def core_memory(tiers: Tiers) -> tuple[int, int]:
    """As `kvwarehouse.host.CoreMemory` says."""
    from kvwarehouse.core import CoreOptions, index_bytes, policy_names, table_bytes

    options = CoreOptions()
    options.dram_bytes, options.nvme_capacity_bytes = tiers.dram_bytes, tiers.nvme_bytes
    options.nvme_dir = "some" if tiers.nvme_bytes else ""  # only whether there is one matters
    options.index_pages = tiers.index_pages
    if tiers.policy in policy_names():  # a newer daemon may have others
        options.policy = tiers.policy
    return index_bytes(options), table_bytes(options)


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
