"""Facts that the checks judge: gathered by look.py and probe.py, made up by tests. Immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    """Whether the engine finds the connector: by its name, or by module and class."""
    connector_error: str = ""
    hash_algorithm: str = ""
    """vLLM's default for block hashes."""
    command_block_tokens: int = 0
    """Tokens of a block of the engine that the given command line would start; 0: not known."""
    command_step_tokens: int = 0
    """Tokens of its largest step."""
    command_tp: int = 1
    command_pp: int = 1
    """Its tensor-parallel ranks, and pipeline stages."""
    command_error: str = ""
    """Why that command line would start no engine that is served."""
    crash: str = ""
    """How that process ended, if not by itself, and in which step."""


@dataclass(frozen=True)
class HostFacts:
    available_bytes: int = 0
    """Of memory, to new programs; 0: not known."""
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
class ConfigFacts:
    """The engine's own configuration, as it was given to the doctor."""

    given: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """Why it could not be read."""


@dataclass(frozen=True)
class SettingsFacts:
    """What the connector's own code makes of that configuration and the environment."""

    address: str = ""
    """Of the daemon; "" where they do not name one that is good."""
    mode: str = "read_write"
    """Or read_only, write_only."""
    verify: str = "always"
    staging_bytes: int = 0
    """Host memory of each rank; 0: it has none, or decides by itself."""
    error: str = ""
    """Why the engine would refuse to start."""


@dataclass(frozen=True)
class PageFacts:
    """Of the model that the engine is to serve, as `kvwarehouse size` has them."""

    model: str = ""
    """"": none was given."""
    tokens: int = 0
    """Of a page."""
    page_bytes: int = 0
    """Of a page of all layers and shards."""
    step_bytes: int = 0
    """What a rank holds of a prompt as long as the engine's largest step; 0: not known."""
    kinds: int = 1
    """Of layers: a cache group has those of one kind, and smaller pages."""
    error: str = ""


@dataclass(frozen=True)
class Facts:
    software: SoftwareFacts = field(default_factory=SoftwareFacts)
    engine: EngineFacts = field(default_factory=EngineFacts)
    host: HostFacts = field(default_factory=HostFacts)
    daemon: DaemonFacts = field(default_factory=DaemonFacts)
    environment: Mapping[str, str] = field(default_factory=dict)
    config: ConfigFacts = field(default_factory=ConfigFacts)
    settings: SettingsFacts = field(default_factory=SettingsFacts)
    page: PageFacts = field(default_factory=PageFacts)
    command: tuple[str, ...] = ()
    """Arguments of the engine's own command line; () where none was given."""
