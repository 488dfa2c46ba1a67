"""Configuration of the daemon: flags over environment (KVW_*) over a TOML file over defaults.

Read once, at the edge, into a frozen Config; only this file reads configuration files and the
environment. What is missing gets its default; what is present but bad, or unknown, refuses to
start, and the error names the flag, the variable, or the file and key that said it. Only a variable
that nobody knows is left to a warning: it may be another program's, or an orchestrator's.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvwarehouse import places, remote_file, settings
from kvwarehouse.addresses import is_loopback
from kvwarehouse.errors import UsageError
from kvwarehouse.host import filesystems, memory
from kvwarehouse.remote_file import RemoteFile
from kvwarehouse.settings import setting

ENVIRONMENT_PREFIX: Final = "KVW_"

_PREFIX_ADVICE: Final = (
    f"what begins with {ENVIRONMENT_PREFIX} is ours; another program takes another prefix"
)

OTHER_VARIABLES: Final[Mapping[str, str]] = {
    "KVW_ADDRESS": "where commands and clients find their daemon, as --address of a command",
    "KVW_CONFIG": "the file of settings, as --config of `serve`",
    "KVW_COPY_PATH": "how the core copies pages, in place of the best that the processor has",
    "KVW_CUDA_DRIVER": "the library in place of CUDA's driver (tests)",
    "KVW_DAEMON_UID": "a user whose daemon clients trust, beside their own and root",
    "KVW_NO_APT": "`make setup` says which packages are missing, and installs none",
    "KVW_NVRTC": "the library in place of NVRTC (tests)",
    "KVW_ROUNDS": "how many times as long random tests run",
    "KVW_SEED": "the seed of a test run, to repeat it",
    "KVW_TOKEN": "the token for a daemon at host:port, as --token-file of a command",
}
"""With the prefix, but not settings of the daemon, and what each is for."""

TEST_PREFIX: Final = "KVW_TEST_"
"""Variables of the project's own test runs; the daemon does not look at them."""

_SERVICE_VARIABLE: Final = re.compile(
    r"KVW_([A-Z0-9_]+_)?"
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""What Kubernetes puts into each container of a namespace that has a Service named kvw or kvw-*
(kubernetes.io, "Accessing the Service", environment variables)."""

DEFAULT_HTTP: Final = "127.0.0.1:9470"


@dataclass(frozen=True)
class Config:
    """Everything `kvwarehouse serve` can be told. Paths are absolute, sizes in bytes.

    `sources` says where each value came from: "--dram", "KVW_DRAM", "/etc/kvw.toml", "default".
    """

    name: str = setting(
        "default",
        settings.name,
        "Name of this warehouse on its host: part of the default paths, shown in status.",
        "one warehouse a user and host is the common case",
    )
    socket: str = setting(
        "",
        settings.path,
        "Local socket; gRPC is served beside it at SOCKET.grpc. Both 0600.",
        "a directory of the user's own that goes with the login or boot: $XDG_RUNTIME_DIR, else "
        "/run/user/UID, else a 0700 directory in /tmp",
    )
    listen: str = setting(
        "",
        settings.address,
        "TCP address of gRPC, host:port. 0.0.0.0 and [::] are all addresses of the host, IPv4 and "
        "IPv6 alike. Needs --token-file; beyond loopback TLS too.",
        "closed: nothing listens on a network unless it is asked to",
    )
    tls_cert: str = setting(
        "",
        settings.path,
        "PEM file with the certificate chain for --listen.",
        "no certificate that nobody chose",
    )
    tls_key: str = setting(
        "",
        settings.path,
        "PEM file with the private key for --listen; ours or root's, not readable by others.",
        "goes with --tls-cert",
    )
    token_file: str = setting(
        "",
        settings.path,
        "File with the bearer tokens that --listen accepts, one a line; ours or root's, not "
        "readable by others.",
        "no token that nobody chose",
    )
    fleet_secret: str = setting(
        "",
        settings.path,
        "File of at least 32 bytes that all daemons of a fleet have, so that equal pages have "
        "equal keys on all hosts; ours or root's, not readable by others. Make it with: openssl "
        "rand -hex 32. For new directories: those that have a secret keep it, and another one is "
        "refused (fleet_secret_differs).",
        "a random secret for each warehouse: hosts that share one trust each other with all KV",
    )
    remote: str = setting(
        "",
        settings.store_url,
        "Remote tier: the store that all hosts of a fleet share: s3://BUCKET/PREFIX, "
        "gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///MOUNTED/FOLDER. Needs --fleet-secret "
        "and --remote-capacity. Credentials are those of the environment, by the names that the "
        "store's own tools read. Empty: no remote tier.",
        "KV is what users wrote: it leaves this host only where somebody said so",
    )
    remote_capacity_bytes: int = setting(
        0,
        settings.size,
        "How much the whole fleet keeps in the store; what comes beyond it is not put. Say the "
        "same on all hosts. Required with --remote.",
        "none: a store bills what it keeps",
        key="remote_capacity",
    )
    remote_ttl_days: int = setting(
        7,
        settings.days(1, 7),
        "How long an object stays that nobody uses, in whole days: 1d to 7d.",
        "what is used is kept anyway, and a conversation seldom goes on after a week",
        key="remote_ttl",
    )
    remote_write: str = setting(
        "reused",
        settings.choice("reused", "all", "none"),
        "What is put: reused, pages that are used a second time; all, each page when it is stored; "
        "none.",
        "most prompts are never seen again, and a put costs money and network",
    )
    remote_read: str = setting(
        "on",
        settings.choice("on", "off"),
        "Whether lookups count what the store has and loads read it back: on or off. No lookup "
        "asks the store, and a load waits for it within its own deadline.",
        "that is what the store is for; off keeps a copy that only other hosts read",
    )
    remote_config: str = setting(
        "",
        settings.path,
        "TOML file with more of the remote tier, each optional: endpoint, region, ca_file, "
        "connect_s, get_deadline_s, put_deadline_s, puts, gets, write_bytes_per_s; ours or root's.",
        "a cloud's own store needs none of it",
    )
    dram_bytes: int = setting(
        0,
        settings.size,
        "DRAM tier: a bound, and memory that is taken at the start. 0: the default; there is no "
        "daemon without it.",
        "an eighth of the memory this process may use, at most half of the arena's tmpfs: the "
        "engine beside us has the first claim on memory",
        key="dram",
    )
    arena_dir: str = setting(
        "",
        settings.path,
        "Directory of the DRAM tier, on tmpfs (0700). Keep it, and the tier outlives the daemon.",
        "/dev/shm/kvwarehouse-UID-NAME: the tmpfs that every Linux has",
    )
    nvme_dir: str = setting(
        "",
        settings.path,
        "Directory of the NVMe tier and of the ledger (0700). Empty: no NVMe tier.",
        "no disk is written that nobody named",
    )
    nvme_capacity_bytes: int = setting(
        0,
        settings.size,
        "NVMe tier: a hard bound on the files of its pages; the ledger beside them takes up to "
        "256 MiB more. Required with --nvme-dir. Files that are there keep their size, so after a "
        "change somewhat less may be used than is asked for.",
        "none: a bound that nobody chose would fill a shared disk or waste one's own",
        key="nvme_capacity",
    )
    nvme_writes_per_day: str = setting(
        "",
        settings.daily,
        "How much NVMe may be written a day, so that the drive lasts: times its capacity (1.0), or "
        "a size (500GB). Where that is too little for all, what is asked for again is written "
        "first, and the rest stays in DRAM. What is not used is carried over, a day's worth at "
        "most. 0: no bound.",
        "none: a disk's endurance is its owner's to spend, and all that is stored is written",
    )
    hbm_bytes: int = setting(
        0,
        settings.size,
        "HBM tier: memory of a GPU that is taken at the start, for copies of the hottest pages. "
        "0: none, and no GPU is touched.",
        "an engine takes what its GPU has; what it leaves is a decision",
        key="hbm",
    )
    device: int = setting(
        0,
        settings.count(0, 255),
        "The GPU of the HBM tier, as CUDA counts them in the daemon's process.",
        "goes with --hbm",
    )
    index_pages: int = setting(
        0,
        settings.count(0, 1 << 30),
        "Pages the index has room for, all tiers; close to that the coldest leave, and of a prompt "
        "of more than half as many pages the end may not be stored. 0: chosen from the capacities.",
        "one for each 64 KiB of DRAM and NVMe, at least 65,536, of 128 bytes each. Where a model's "
        "pages are smaller the log says so, with the number that is enough (index_small)",
    )
    http: str = setting(
        DEFAULT_HTTP,
        settings.http_address,
        "Address of /metrics, /healthz and /readyz, host:port; port 0: any free one; or off. It "
        "has neither tokens nor TLS: beyond loopback the log warns (http_exposed).",
        "loopback, so that exposing it is a decision. One that is taken refuses to start: a "
        "second daemon of the host needs its own",
    )
    policy: str = setting(
        "lru",
        settings.choice("lru", "adaptive"),
        "Which pages are evicted first: lru, those that were not used for longest; adaptive, also "
        "by how often they were used, as far as that hits more (docs/policies.md).",
        "descendants before ancestors, which is what prefixes want, and nothing to learn; adaptive "
        "is new",
    )
    io_engine: str = setting(
        "auto",
        settings.choice("auto", "io_uring", "pread"),
        "How the NVMe tier reads and writes.",
        "a probe knows whether io_uring is permitted here",
    )
    keep_percent: int = setting(
        50,
        settings.count(0, 90),
        "How much of DRAM may be kept, by `kvwarehouse keep` and by requests, in percent. "
        "0: nothing.",
        "what nobody keeps has the other half",
    )
    write_queue_bytes: int = setting(
        0,
        settings.size,
        "Pages waiting to be written to NVMe. 0: chosen. Beyond it new pages stay in DRAM only.",
        "a second or two of a common disk's write rate",
        key="write_queue",
    )
    nvme_segment_bytes: int = setting(
        0,
        settings.size,
        "Size of one NVMe segment file. 0: chosen from the capacity.",
        "256 MiB, less for small tiers, so that reclaim has segments to choose from",
        key="nvme_segment",
    )
    flush_interval_s: float = setting(
        1.0,
        settings.seconds(0.01, 3600),
        "How much of what reached NVMe a power loss may take, in seconds.",
        "a flush a second costs well under 1 % of a disk",
    )
    nvme_retry_s: float = setting(
        30.0,
        settings.seconds(0.1, 3600),
        "When an NVMe tier whose disk refused writes is tried again, in seconds.",
        "a full disk is seldom empty sooner, and a try costs a small write",
    )
    nvme_answer_s: float = setting(
        30.0,
        settings.seconds(0.1, 3600),
        "How long the start waits for each answer of the disk under --nvme-dir, in seconds. "
        "Beyond it the daemon serves without that tier, until its next start. Later it is how long "
        "the ledger there is waited for.",
        "a disk that is busy answers in milliseconds, one that hangs never does",
    )
    limbo_after_s: float = setting(
        30.0,
        settings.seconds(0.1, 3600),
        "When a page whose writers do not finish is given up, in seconds.",
        "far above any copy of a page, far below a user's patience",
    )
    grace_s: float = setting(
        5.0,
        settings.seconds(0, 3600),
        "How long DMA of a dead process is assumed to go on, in seconds.",
        "generous: device queues drain in milliseconds. Too small can corrupt a later page",
    )
    drain_timeout_s: float = setting(
        30.0,
        settings.seconds(0, 3600),
        "How long the flush of an orderly exit may take, in seconds. What the disk is writing then "
        "is waited for.",
        "what orchestrators commonly wait before they kill",
    )
    streams: int = setting(
        8,
        settings.count(1, 256),
        "Stores and loads over gRPC at the same time, over TCP half of them of one host; more are "
        "refused for now.",
        "two or three fill a 10 Gbit/s network",
    )
    staging_bytes: int = setting(
        256 << 20,
        settings.size,
        "Memory for pages on their way through gRPC, all streams together.",
        "16 MiB a stream, and room for one large page",
        key="staging",
    )
    kv_events: str = setting(
        "",
        settings.endpoint,
        "ZeroMQ endpoint at which KV events are published, in vLLM's format: what enters and "
        "leaves the tiers, with token ids, for KV-aware routers. Empty: none.",
        "token ids are what users wrote: nobody is told who was not asked for",
    )
    kv_events_replay: str = setting(
        "",
        settings.endpoint,
        "ZeroMQ endpoint at which subscribers ask for events that they missed. Empty: none.",
        "goes with --kv-events; without it a subscriber's losses last until the next restart",
    )
    kv_events_topic: str = setting(
        "",
        settings.text,
        "Topic of the events: llm-d wants kv@POD@MODEL.",
        "vLLM's own default, and Dynamo subscribes to all",
    )
    kv_events_namespace: str = setting(
        "",
        settings.text,
        "Whose pages are published: a model's name, or a namespace's id in hex.",
        "the one that was registered last and has neither salt nor adapter: a router's entry has "
        "one model and one block size, and so has a stream",
    )
    kv_events_buffer_bytes: int = setting(
        64 << 20,
        settings.size,
        "Memory for events that can be asked for again; what is older is said anew, all of it.",
        "some 100,000 pages of 64 tokens",
        key="kv_events_buffer",
    )
    kv_events_exposure: str = setting(
        "loopback",
        settings.choice("loopback", "network"),
        "Who may subscribe: this host alone, or whoever reaches the endpoint. ZeroMQ's events are "
        "neither encrypted nor authenticated.",
        "token ids are what users wrote; a network that may see them is a decision",
    )
    log_format: str = setting(
        "auto",
        settings.choice("auto", "json", "text"),
        "Log lines on stderr: json or text. auto: text on a terminal, else json.",
        "people read terminals, programs read the rest",
    )
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    warnings: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """What the environment has that looks like a setting and is none."""
    remote_file: RemoteFile = field(default_factory=RemoteFile)
    """What the file of --remote-config says."""

    @property
    def grpc_socket(self) -> str:
        return self.socket + ".grpc"

    @property
    def nvme_bytes_per_day(self) -> int:
        """That the NVMe tier may write; 0: no bound."""
        if not self.nvme_writes_per_day or not self.nvme_dir:
            return 0
        return settings.daily_bytes(
            self.nvme_writes_per_day, "--nvme-writes-per-day", self.nvme_capacity_bytes
        )


_FIELDS: Final = {
    item.metadata["key"] or item.name: item for item in dataclasses.fields(Config) if item.metadata
}

_OF_PLACE: Final = {
    "remote": "The store: s3://BUCKET/PREFIX, gs://..., az://... or file:///MOUNTED/FOLDER.",
    "remote_config": "TOML file with endpoint, region and the like, as of the daemons.",
    "fleet_secret": "The file that all daemons of the fleet have.",
    "remote_capacity": "How much the whole fleet keeps in the store.",
    "remote_ttl": "How long an object stays that nobody uses: 1d to 7d (default: 7d).",
}
"""What a command says of the settings that it shares with the daemon."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every setting as a flag, with --config and --print-config. Values stay text here:
    `load` checks them, so that all four sources give the same errors."""
    for key, item in _FIELDS.items():
        about = item.metadata
        default = f"{item.default}" if item.default else ""
        text = f"{about['meaning']} Default: {default + ': ' if default else ''}{about['why']}."
        _add_flag(parser, key, text)
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with these settings; ours or root's."
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="Print the settings in effect as TOML, with the source of each, and exit.",
    )


def add_place_flags(parser: argparse._ActionsContainer) -> None:
    """Of the settings those that say where a fleet's objects are, and --config."""
    for key, meaning in _OF_PLACE.items():
        _add_flag(parser, key, meaning)
    parser.add_argument(
        "--config", metavar="FILE", help="The file of settings of a daemon, which has all of these."
    )


def _add_flag(parser: argparse._ActionsContainer, key: str, text: str) -> None:
    parser.add_argument(
        _flag(key),
        dest=key,
        metavar=_FIELDS[key].metadata["parse"].shown,
        help=text.replace("%", "%%"),
    )


def load(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Config:
    """The settings in effect. `flags`: key to text, None for absent (vars() of the parsed
    arguments will do: what is no setting is ignored). `environ`: default, this process's.

    Reads the file that --config or KVW_CONFIG names, and facts of the machine (memory, mounts) for
    defaults that depend on them. Raises UsageError that names the source of what is bad."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources = {item.name: "default" for item in _FIELDS.values()}
    for key, (value, name, source) in _given(flags, environ).items():
        item = _FIELDS[key]
        values[item.name] = item.metadata["parse"](value, name)
        sources[item.name] = source
    config = Config(**values, sources=sources, warnings=tuple(unknown_variables(environ)))
    _check(config)
    return _complete(config, environ)


@dataclass(frozen=True)
class FleetPlace:
    """Where a fleet's objects are, for commands that look at them without a daemon."""

    url: str
    fleet_secret: str
    """The file."""
    capacity_bytes: int
    """0: nobody said."""
    ttl_days: int
    remote_file: RemoteFile


def load_place(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> FleetPlace:
    """As `load`, of the settings that `add_place_flags` has: no others are looked at. Raises
    UsageError where URL or secret are missing."""
    environ = os.environ if environ is None else environ
    given = _given(flags, environ)
    values: dict[str, Any] = {key: _FIELDS[key].default for key in _OF_PLACE}
    for key in _OF_PLACE.keys() & given.keys():
        value, name, _ = given[key]
        values[key] = _FIELDS[key].metadata["parse"](value, name)
    for key in ("remote", "fleet_secret"):
        if not values[key]:
            raise _bad(
                f"{_flag(key)} is missing; name it, or with --config the file of settings of a "
                "daemon of this fleet"
            )
    return FleetPlace(
        values["remote"],
        values["fleet_secret"],
        values["remote_capacity"],
        values["remote_ttl"],
        remote_file.read(values["remote_config"]),
    )


def _given(flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, tuple[Any, str, str]]:
    """Key to its value, its name in errors, and its source."""
    path = flags.get("config") or environ.get("KVW_CONFIG")
    given: dict[str, tuple[Any, str, str]] = {}
    if path:
        given.update(_from_file(str(path)))
    given.update(_from_environment(environ))
    for key in _FIELDS:
        if flags.get(key) is not None:
            given[key] = (flags[key], _flag(key), _flag(key))
    return given


def print_config(config: Config) -> str:
    """`config` as TOML that --config reads back to the same settings."""
    lines = ["# kvwarehouse serve: the settings in effect, and where each came from."]
    for key, item in _FIELDS.items():
        about = item.metadata
        value = about["parse"].show(getattr(config, item.name))
        source = config.sources.get(item.name, "default")
        lines.append(f"\n# {about['meaning']}\n{key} = {_toml(value)}  # {source}")
    return "\n".join(lines) + "\n"


def default_socket(environ: Mapping[str, str] | None = None, name: str = "default") -> str:
    """Where a daemon of this user listens when nothing else was said; clients look there too."""
    return places.default_socket(os.environ if environ is None else environ, name)


def _from_file(path: str) -> dict[str, tuple[Any, str, str]]:
    table = settings.read_table(path, "--config", _FIELDS, "see --print-config")
    return {key: (value, f"{path}: {key}", path) for key, value in table.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str, str]]:
    given: dict[str, tuple[Any, str, str]] = {}
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in OTHER_VARIABLES:
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if key in _FIELDS and name == name.upper():
            given[key] = (environ[name], name, name)
    return given


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that has our prefix, and that no program of ours reads."""
    return [
        f"{name} is set and nobody reads it: "
        + (_meant_variable(name) or f"no setting of kvwarehouse is called so ({_PREFIX_ADVICE})")
        for name in sorted(environ)
        if _is_unknown_variable(name)
    ]


def _is_unknown_variable(name: str) -> bool:
    known = name in OTHER_VARIABLES or name in _variables()
    ours = name.startswith(ENVIRONMENT_PREFIX) and not name.startswith(TEST_PREFIX)
    return ours and not known and not _SERVICE_VARIABLE.fullmatch(name)


def _meant_variable(name: str) -> str:
    """A question for the one that was probably meant, "" where none is close."""
    close = difflib.get_close_matches(name.upper(), [*_variables(), *OTHER_VARIABLES], 1)
    return f"did you mean {close[0]}?" if close else ""


def _variables() -> list[str]:
    return [ENVIRONMENT_PREFIX + key.upper() for key in _FIELDS]


def _check(config: Config) -> None:
    """What no single value can say."""
    if config.nvme_dir and not config.nvme_capacity_bytes:
        raise _bad(
            f"--nvme-dir {config.nvme_dir!r} needs --nvme-capacity, a hard bound on the disk that "
            f"it takes; {filesystems.free_hint(config.nvme_dir)}"
        )
    if config.nvme_capacity_bytes and not config.nvme_dir:
        raise _bad("--nvme-capacity needs --nvme-dir, the directory to keep the pages in")
    if config.nvme_writes_per_day and not config.nvme_dir:
        raise _bad("--nvme-writes-per-day is of no use without --nvme-dir: no disk is written")
    if bool(config.tls_cert) != bool(config.tls_key):
        have, lack = ("--tls-cert", "--tls-key") if config.tls_cert else ("--tls-key", "--tls-cert")
        raise _bad(f"{have} needs {lack} with it")
    for item in ("tls_cert", "token_file"):
        if getattr(config, item) and not config.listen:
            raise _bad(f"{_flag(item)} is of no use without --listen; the local sockets need none")
    _check_remote(config)
    _check_events(config)
    if config.listen:
        _check_listen(config)


def _check_remote(config: Config) -> None:
    if not config.remote:
        for item in ("remote_capacity", "remote_config"):
            if getattr(config, _FIELDS[item].name):
                raise _bad(f"{_flag(item)} is of no use without --remote, the URL of the store")
        return
    if not config.fleet_secret:
        raise _bad(
            f"--remote {config.remote!r} needs --fleet-secret: without it keys of two hosts never "
            "meet, and what one puts no other finds"
        )
    if not config.remote_capacity_bytes:
        raise _bad(
            f"--remote {config.remote!r} needs --remote-capacity, a bound on what the whole fleet "
            "keeps there"
        )


def _check_listen(config: Config) -> None:
    loopback = is_loopback(config.listen)
    needs = ["token_file", *(() if loopback else ("tls_cert", "tls_key"))]
    missing = " ".join(_flag(item) for item in needs if not getattr(config, item))
    if missing and loopback:
        raise _bad(
            f"--listen {config.listen!r} needs {missing}: every user of this host, and every "
            "container of a pod, reaches loopback; make a token with: openssl rand -hex 32. The "
            "sockets that only this user reaches need none: leave --listen out"
        )
    if missing:
        raise _bad(
            f"--listen {config.listen!r} is not loopback and needs {missing}: KV is what users "
            "wrote, and must not cross a network unprotected; 127.0.0.1 needs no TLS, because "
            "clients ask the kernel who listens there"
        )


def _check_events(config: Config) -> None:
    if config.kv_events_replay and not config.kv_events:
        raise _bad("--kv-events-replay is of no use without --kv-events, whose events it repeats")
    if config.kv_events and config.kv_events == config.kv_events_replay:
        raise _bad(
            f"--kv-events and --kv-events-replay are both {config.kv_events!r}; give each its own"
        )
    for item in ("kv_events", "kv_events_replay"):
        endpoint = getattr(config, item)
        open_to_all = endpoint and not settings.endpoint_is_local(endpoint)
        if open_to_all and config.kv_events_exposure != "network":
            raise _bad(
                f"{_flag(item)} {endpoint!r} can be reached from a network, and its events carry "
                "the token ids of prompts in clear; use tcp://127.0.0.1:PORT or ipc:///PATH, with "
                "a tunnel where the router is on another host, or, where the network is trusted "
                "with prompts, add --kv-events-exposure network"
            )


def _complete(config: Config, environ: Mapping[str, str]) -> Config:
    """Fills in the defaults that follow from other settings and from the machine."""
    arena_dir = config.arena_dir or places.default_arena_dir(config.name)
    socket = config.socket or places.default_socket(environ, config.name)
    places.check_socket_path(socket)
    if arena_dir == config.nvme_dir:
        raise _bad(f"--arena-dir and --nvme-dir are both {arena_dir!r}; give each its own")
    dram = config.dram_bytes or places.default_dram_bytes(
        memory.usable_bytes(), filesystems.total_bytes(arena_dir)
    )
    return dataclasses.replace(
        config,
        arena_dir=arena_dir,
        socket=socket,
        dram_bytes=dram,
        remote_file=remote_file.read(config.remote_config),
    )


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _toml(value: str | int | float) -> str:
    # A TOML basic string takes JSON's escapes; control characters are refused when read.
    return json.dumps(value, ensure_ascii=False)


def _bad(message: str) -> UsageError:
    return UsageError(message, code="bad_config")
