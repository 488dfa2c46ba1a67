"""Facts that the checks judge: gathered by look.py and probe.py, made up by tests. Immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SoftwareFacts:
    """The environment of Python packages that the doctor runs in, which must be the engine's."""

    python: str = ""
    """Path of the interpreter."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Distribution to version, of those that matter here; one that is missing is not there."""
    engine_distributions: tuple[str, ...] = ()
    """Distributions that bring the module of the engine."""
    plugins: tuple[tuple[str, str], ...] = ()
    """(name, object) of the entry points by which the engine finds its plugins."""
    unmet: tuple[str, ...] = ()
    """Requirements of kvwarehouse that the environment does not meet, as pip writes them."""


@dataclass(frozen=True)
class EngineFacts:
    """What a process of its own found when it imported the engine as the engine itself does."""

    version: str = ""
    engine_error: str = ""
    torch: str = ""
    torch_error: str = ""
    device: str = ""
    """cpu, cuda, xpu, ...; "" where the engine was not imported."""
    device_name: str = ""
    registered: bool = False
    """Whether the engine knows the connector by its name."""
    connector_error: str = ""
    hash_algorithm: str = ""
    """The engine's default for block hashes."""
    crash: str = ""
    """How that process ended, if not by itself, and in which step."""


@dataclass(frozen=True)
class HostFacts:
    shm_bytes: int = 0
    """Size of /dev/shm; 0: there is none."""
    shm_free_bytes: int = 0
    memlock_bytes: int = -1
    """Soft limit of locked memory; -1: unlimited."""
    user: int = 0


@dataclass(frozen=True)
class DaemonFacts:
    address: str = ""
    path: str = ""
    """Of the local socket; "" where the address names none."""
    exists: bool = False
    is_socket: bool = False
    owner: int = -1
    accessible: bool = False
    """Whether this user may write to the socket."""
    service_exists: bool = False
    """Whether the socket of the gRPC service lies beside it."""
    error: str = ""
    """Why no session could be had, in the client's words."""
    error_code: str = ""
    status: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    software: SoftwareFacts = field(default_factory=SoftwareFacts)
    engine: EngineFacts = field(default_factory=EngineFacts)
    host: HostFacts = field(default_factory=HostFacts)
    daemon: DaemonFacts = field(default_factory=DaemonFacts)
    environment: Mapping[str, str] = field(default_factory=dict)
