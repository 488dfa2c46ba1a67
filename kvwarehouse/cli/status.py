"""`kvwarehouse status`: one snapshot of a warehouse."""

from __future__ import annotations

import argparse
import os
from typing import Any

from kvwarehouse.cli.connection import add_connection, address_from, connect_from, is_local
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, print_json, print_table
from kvwarehouse.durations import format_duration
from kvwarehouse.gpu import last_selection
from kvwarehouse.sizes import format_size

EXAMPLES = """\
  kvwarehouse status
  kvwarehouse status --address gpu-7:7070 --tls ca.pem
  kvwarehouse status --json | jq .core.lookups
"""


# Slots that hold no page that could be found.
_SLOT_STATES = {"reserved": "being written", "limbo": "in limbo", "zombie": "read after eviction"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_connection(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    with connect_from(args) as client:
        status = client.status()
    if is_local(address_from(args, os.environ)):
        # The clients of this host find it out; no daemon knows of their GPUs.
        status["nvme_to_gpu"] = last_selection()
    if args.json:
        print_json(status)
        return Exit.OK
    core = status["core"]
    print_table("", ("", ""), _summary(status, core))
    if status["problems"]:
        print_table("\nproblems", ("", ">for", ""), _problems(status["problems"]))
    print_table("\ntiers", ("tier", ">capacity", ">used", ">pages", "health"), _tiers(core))
    print_table("\npages since the start", ("", ">pages", ""), _pages(core))
    print_table("\nshards of pages since the start", ("", ">shards", ""), _shards(core))
    remote = status.get("remote") or {}  # a daemon of before says nothing of it
    if remote.get("state"):
        print_table("\nremote tier", ("", ""), remote_rows(remote, core))
    return Exit.OK


def _summary(status: dict[str, Any], core: dict[str, Any]) -> list[tuple[str, str]]:
    service = status["service"]
    rows = [
        ("warehouse", f"{status['name']}, {status['state']}"),
        ("version", status["version"]),
        ("fleet", service["fleet_id"]),
        ("up", f"{core['uptime_s']:,.0f} s, start {core['incarnation']}"),
        ("clients", f"{core['sessions']:,} sessions, {core['pins']['held']:,} pins"),
        ("namespaces", f"{len(core['namespaces']):,}"),
        ("policy", core["policy"]),
        ("index", f"{core['index']['pages']:,} of {core['index']['capacity']:,} pages"),
        ("ledger", service["ledger_health"]),
        ("sockets", ", ".join(filter(None, (service["socket"], service["listen"])))),
    ]
    if day_bytes := core["tiers"]["nvme"].get("budget_bytes_per_day"):
        rows.append(("nvme writes", _budget(core["tiers"]["nvme"], day_bytes)))
    if status.get("nvme_to_gpu"):
        rows.append(("nvme to gpu", status["nvme_to_gpu"]))
    events = status.get("kv_events") or {}
    if events.get("next_number"):
        rows.append(("kv events", _events(events)))
    return rows


def _budget(nvme: dict[str, Any], day_bytes: int) -> str:
    left_bytes = max(0, nvme["budget_left_bytes"])
    return f"{format_size(left_bytes)} left of {format_size(day_bytes)} a day"


def _problems(problems: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(each["what"], format_duration(each["for_s"]), each["reason"]) for each in problems]


def _events(events: dict[str, Any]) -> str:
    of = f"of namespace {events['namespace_id'][:12]}" if events["namespace_id"] else "of none yet"
    said = f"{events['stored']:,} blocks stored, {events['removed']:,} removed {of}"
    if events["losses"]:
        said += f", said anew {events['losses']:,} times"
    return said


def _tiers(core: dict[str, Any]) -> list[tuple[Any, ...]]:
    hbm, dram, nvme = (core["tiers"][tier] for tier in ("hbm", "dram", "nvme"))
    health = nvme["health"]
    if nvme["queued_bytes"]:
        health += f", {format_size(nvme['queued_bytes'])} to write"
    slots = ", ".join(
        f"{dram[f'{state}_slots']:,} slots {what}"
        for state, what in _SLOT_STATES.items()
        if dram[f"{state}_slots"]
    )
    return [
        (
            "hbm",
            format_size(hbm["capacity_bytes"]),
            format_size(hbm["used_bytes"]),
            hbm["pages"],
            hbm["health"],
        ),
        (
            "dram",
            format_size(dram["capacity_bytes"]),
            format_size(dram["used_bytes"]),
            dram["pages"],
            ", ".join(filter(None, (dram["health"], slots))),
        ),
        (
            "nvme",
            format_size(nvme["capacity_bytes"]),
            format_size(nvme["used_bytes"]),
            nvme["pages"],
            health,
        ),
    ]


def remote_rows(remote: dict[str, Any], core: dict[str, Any]) -> list[tuple[str, str]]:
    """What a daemon says of its remote tier, and what its core says of what waits for it."""
    queue, fetches = core["remote_puts"], core["remote_fetches"]
    room = f"{format_size(remote['used_bytes'])} of {format_size(remote['capacity_bytes'])}"
    objects = f"{remote['objects']:,} objects, for {remote['ttl_days']} days"
    ago_s = remote["listed_ago_s"]
    listed = f"listed {format_duration(ago_s)} ago" if ago_s >= 0 else "not listed yet"
    put = _reasons(remote["puts"]) or "none yet"
    if remote["put_bytes"]:
        put += f"; {format_size(remote['put_bytes'])}"
    dropped = _reasons(queue["dropped"])
    rows = [
        ("store", remote["url"]),
        ("state", ": ".join(filter(None, (remote["state"], remote["reason"])))),
        ("used", f"{room}, {objects}"),
        ("daemons", f"{remote['nodes']:,}, {listed}"),
        ("writes", remote["write"]),
        ("runs put", put),
        ("runs to put", f"{queue['queued_runs']:,}"),
    ]
    if dropped:
        rows.append(("runs dropped", dropped))
    rows += _reading(remote, fetches)
    if remote["worker_starts"] > 1:
        rows.append(("worker", f"started {remote['worker_starts']:,} times"))
    return rows


def _reading(remote: dict[str, Any], fetches: dict[str, Any]) -> list[tuple[str, str]]:
    """Of a daemon that reads from the store; one of before does not."""
    if remote["read"] != "on":
        return [("reads", "off")]
    facts = ["on"]
    if remote["read_bytes_per_s"]:
        facts.append(f"{format_size(remote['read_bytes_per_s'])}/s")
    if remote["first_byte_ms"]:
        facts.append(f"the first byte after {remote['first_byte_ms']:,.0f} ms")
    read = _reasons(remote["gets"]) or "none yet"
    if remote["get_bytes"]:
        read += f"; {format_size(remote['get_bytes'])}"
    rows = [
        ("reads", ", ".join(facts)),
        ("runs read", read),
        ("runs to read", f"{fetches['queued'] + fetches['under_way']:,}"),
    ]
    if damaged := _reasons(remote["damaged"]):
        rows.append(("damaged objects", damaged))
    ago_s, owed = remote["epochs_ago_s"], remote["epochs_owed"]
    known = f"known as of {format_duration(ago_s)} ago" if ago_s >= 0 else "not known yet"
    rows.append(("clears", known + (f", {owed:,} not told to the store yet" if owed else "")))
    return rows


def _pages(core: dict[str, Any]) -> list[tuple[str, int, str]]:
    lookups, stores = core["lookups"], core["stores"]
    again = stores["stored_again"]  # by why they had left
    hbm, dram, nvme = (core["tiers"][tier] for tier in ("hbm", "dram", "nvme"))
    hits = sum(lookups[f"pages_hit_{tier}"] for tier in ("hbm", "dram", "nvme", "remote"))
    asked = hits + lookups["pages_missed"]
    rate = f"{hits / asked:.1%} of {asked:,} looked up" if asked else ""
    return [
        ("found", hits, rate),
        ("hit in hbm", lookups["pages_hit_hbm"], ""),
        ("hit in dram", lookups["pages_hit_dram"], ""),
        ("hit on nvme", lookups["pages_hit_nvme"], ""),
        *_from_store("probably in the store", lookups["pages_hit_remote"]),
        ("missed", lookups["pages_missed"], ""),
        ("stored", stores["pages_sealed"], format_size(stores["bytes_sealed"])),
        ("stored again", sum(again.values()), _reasons(again)),
        ("left hbm", sum(hbm["left"].values()), _reasons(hbm["left"])),
        ("left dram", sum(dram["left"].values()), _reasons(dram["left"])),
        ("left nvme", sum(nvme["left"].values()), _reasons(nvme["left"])),
        ("not written to nvme", sum(nvme["not_admitted"].values()), _reasons(nvme["not_admitted"])),
        *_missed_for_writes(again.get("write_budget", 0), asked),
        *_kept(core),
        ("quarantined", core["quarantined"], ""),
        ("orphans", core["orphan_pages"], ""),
    ]


def _missed_for_writes(pages: int, asked: int) -> list[tuple[str, int, str]]:
    """At most: NVMe may have let some of them go by then."""
    if not pages:
        return []
    share = f"{pages / asked:.1%} of those looked up, at most" if asked else ""
    return [("missed for the write budget", pages, share)]


def _kept(core: dict[str, Any]) -> list[tuple[str, int, str]]:
    if not core["keeps"]:
        return []
    held, room = format_size(core["kept_bytes"]), format_size(core["keep_capacity_bytes"])
    return [("kept", core["kept_pages"], f"{core['keeps']:,} keeps, {held} of {room}")]


def _shards(core: dict[str, Any]) -> list[tuple[str, int, str]]:
    """What clients load and store, each the shard of its rank: a page of eight counts eight."""
    loads, stores = core["loads"], core["stores"]
    return [
        ("loaded", loads["pages_loaded"], format_size(loads["bytes_loaded"])),
        ("loaded from hbm", loads["pages_from_hbm"], _damaged(loads["hbm_mismatches"])),
        *_from_store("loaded from the store", loads["pages_from_remote"]),
        ("not loaded", sum(loads["failed"].values()), _reasons(loads["failed"])),
        ("stored", stores["shards_stored"], ""),
        ("stored before", stores["already"], ""),
        ("not stored", sum(stores["dropped"].values()), _reasons(stores["dropped"])),
    ]


def _from_store(what: str, pages: int) -> list[tuple[str, int, str]]:
    return [(what, pages, "")] if pages else []


def _damaged(copies: int) -> str:
    return f"{copies:,} damaged copies, read from dram" if copies else ""


def _reasons(counts: dict[str, int]) -> str:
    most_first = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason} {pages:,}" for reason, pages in most_first if pages)
