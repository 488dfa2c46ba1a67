"""Judges the daemon as an engine on this machine, run by this user, would find it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvwarehouse import format_size as size
from kvwarehouse.host import Finding, fail, ok, skip, warn
from kvwarehouse_connectors.doctor.facts import Facts

# Less is a DRAM tier that a handful of long prompts fills.
SMALL_DRAM_BYTES = 1 << 30
_LATER = ("daemon", "versions", "DRAM tier", "NVMe tier", "index")


def check_warehouse(facts: Facts) -> Iterator[Finding]:
    yield from (first := list(_socket(facts)))
    if any(finding.verdict == "fail" for finding in first):
        yield from (skip(check, "no daemon was reached") for check in _LATER)
        return
    if not facts.daemon.status:
        yield _unreachable(facts)
        yield from (skip(check, "no daemon was reached") for check in _LATER[1:])
        return
    yield _state(facts)
    yield _versions(facts)
    yield from _tiers(facts)


def _socket(facts: Facts) -> Iterator[Finding]:
    daemon, check = facts.daemon, "socket"
    if not daemon.path:
        yield fail(
            "address",
            f"{daemon.address!r} is not a socket of this host",
            "an engine needs the daemon of its own host, whose memory it maps: give"
            " unix:///path/kvw.sock",
        )
        return
    yield ok("address", daemon.address)
    if not daemon.exists:
        yield fail(
            check,
            f"nothing is at {daemon.path}",
            f"start the daemon: `kvwarehouse serve --socket {daemon.path}`; if it runs elsewhere,"
            " give its socket by --address here and kvwarehouse.address there; into a container,"
            " mount the socket's directory",
        )
    elif not daemon.is_socket:
        yield fail(
            check,
            f"{daemon.path} is not a socket",
            "give the socket of `kvwarehouse serve`, as `kvwarehouse status` shows it",
        )
    elif facts.host.user not in (0, daemon.owner):
        yield fail(
            check,
            f"{daemon.path} belongs to user {daemon.owner}, this is user {facts.host.user}",
            "run engine and daemon as one user; a daemon serves only its own user, and root",
        )
    elif not daemon.accessible:
        yield fail(
            check,
            f"{daemon.path} cannot be written by user {facts.host.user}",
            "its mode should be 0600 and its user this one; start the daemon again",
        )
    elif not daemon.service_exists:
        yield fail(
            check,
            f"{daemon.path}.grpc is missing beside it",
            "mount the whole directory into the container, not the one socket",
        )
    else:
        yield ok(check, f"{daemon.path}, of user {daemon.owner}")


def _unreachable(facts: Facts) -> Finding:
    daemon = facts.daemon
    fix = "start the daemon again; `kvwarehouse status` and its log say more"
    if daemon.error_code == "no_daemon":
        fix = f"the socket was left behind: `kvwarehouse serve --socket {daemon.path}`"
    elif daemon.error_code == "daemon_untrusted":
        fix = f"run engine and daemon as one user, or set KVW_DAEMON_UID={daemon.owner} here"
    return fail("daemon", f"no session: {daemon.error} [{daemon.error_code}]", fix)


def _state(facts: Facts) -> Finding:
    state = str(facts.daemon.status.get("state", ""))
    if state != "serving":
        return warn(
            "daemon",
            f"it is {state}: it may refuse new pages",
            "wait until it has started; `kvwarehouse drain --undo` takes a drain back",
        )
    core = _part(facts.daemon.status, "core")
    return ok("daemon", f"serves since {float(core.get('uptime_s', 0)):,.0f} s")


def _versions(facts: Facts) -> Finding:
    here = facts.software.versions.get("kvwarehouse", "")
    there = str(facts.daemon.status.get("version", ""))
    if here != there:
        return warn(
            "versions",
            f"the daemon is {there}, the package in the engine's environment is {here or '?'};"
            " they speak the same protocol",
            "install one version in both when convenient",
        )
    return ok("versions", f"daemon and package are {here}")


def _tiers(facts: Facts) -> Iterator[Finding]:
    core = _part(facts.daemon.status, "core")
    tiers, index = _part(core, "tiers"), _part(core, "index")
    dram, nvme = _part(tiers, "dram"), _part(tiers, "nvme")
    room = int(dram.get("capacity_bytes", 0))
    if room < SMALL_DRAM_BYTES:
        yield warn(
            "DRAM tier",
            f"{size(room)}: a few prompts fill it",
            "start the daemon with a larger --dram; `kvwarehouse size --help` says how much a model"
            " needs",
        )
    else:
        yield ok("DRAM tier", f"{size(room)}, {size(int(dram.get('used_bytes', 0)))} used")
    health = str(nvme.get("health", ""))
    if health == "off":
        yield ok("NVMe tier", "none")
    elif health == "ok":
        yield ok("NVMe tier", f"{size(int(nvme.get('capacity_bytes', 0)))}")
    else:
        yield warn(
            "NVMe tier",
            f"{health}: {nvme.get('reason', '')}",
            "`kvwarehouse status` and the daemon's log say more; the DRAM tier works without it",
        )
    room = int(index.get("capacity", 0))
    if not index.get("bound"):
        yield ok("index", f"{int(index.get('pages', 0)):,} of {room:,} pages")
    else:
        yield warn(
            "index",
            f"its room for {room:,} pages was too little: pages left, or were not stored",
            "start the daemon with a larger --index-pages: `index_small` in its log has the number",
        )


def _part(mapping: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = mapping.get(name)
    return part if isinstance(part, Mapping) else {}
