"""Each alert fires in its case and in no other; none does in a daemon that is healthy, idle, busy,
restarted or drained for a short while. By promtool, on a clock of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvwarehouse.daemon import metrics
from kvwarehouse.wire import status_pb2
from testkit.prometheus import RULES, names_in, program

MINUTES = 90
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
}
NAMED = {name for rule in ALERTS.values() for name in names_in(rule["expr"])}

# Each minute of a daemon that has much to do: full, evicting, and with the few losses of every day.
BUSY = {
    "loaded_pages_total": 600,
    'load_failed_pages_total{reason="stale"}': 6,
    "sealed_pages_total": 400,
    "stored_shards_total": 400,
    'store_dropped_pages_total{reason="no_room"}': 4,
    'store_dropped_pages_total{reason="parent_missing"}': 200,
    'store_dropped_pages_total{reason="cleared"}': 100,
    'nvme_not_admitted_pages_total{reason="queue_full"}': 4,
    'nvme_not_admitted_pages_total{reason="parent_not_admitted"}': 40,
    "remote_offered_runs_total": 30,
    'remote_dropped_runs_total{reason="queue_full"}': 1,
    'remote_dropped_runs_total{reason="already"}': 10,
    'remote_fetches_total{end="filled"}': 40,
    'remote_fetches_total{end="missing"}': 1,
    'remote_fetches_total{end="cleared"}': 10,
}


def status(**nvme: Any) -> status_pb2.Status:
    """Of a daemon that is full and serves."""
    made = status_pb2.Status(name="default", version="1", state="serving")
    made.core.incarnation = 3
    made.core.connections = made.core.sessions = 4
    tiers = made.core.tiers
    tiers.hbm.health = "off"
    tiers.dram.capacity_bytes = tiers.dram.used_bytes = 1 << 30
    tiers.nvme.health = "ok"
    tiers.nvme.capacity_bytes = tiers.nvme.used_bytes = 1 << 34
    made.core.index.pages, made.core.index.capacity = 950, 1000
    made.service.ledger_health = "ok"
    made.service.connections_max = 512
    made.kv_events.SetInParent()
    made.remote.state, made.remote.worker_starts = "serving", 1
    made.remote.epochs_ago_s = 3.0
    return made


def new() -> status_pb2.Status:
    """Of one that has nothing yet, neither NVMe nor KV events, no --listen and no
    --remote."""
    made = status()
    made.core.tiers.nvme.Clear()
    made.core.tiers.nvme.health = "off"
    made.core.tiers.dram.used_bytes = made.core.index.pages = 0
    made.service.connections_max = 0
    made.ClearField("kv_events")
    made.ClearField("remote")
    return made


def exported(snapshot: status_pb2.Status) -> dict[str, float]:
    """Each sample of a scrape that a rule looks at, called as in BUSY."""
    found = {}
    for family in text_string_to_metric_families(metrics.render(snapshot)):
        for sample in family.samples:
            if sample.name not in NAMED:
                continue
            labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
            name = sample.name.removeprefix("kvwarehouse_") + (f"{{{labels}}}" if labels else "")
            found[name] = sample.value
    return found


def steady(snapshot: status_pb2.Status, rises: Mapping[str, float]) -> dict[str, str]:
    """Values over time, as promtool writes them."""
    samples = exported(snapshot)
    assert set(rises) <= set(samples), set(rises) - set(samples)
    made = {name: f"{value:g}+{rises.get(name, 0):g}x{MINUTES}" for name, value in samples.items()}
    return {**made, "up": f"1x{MINUTES}"}


def restarted(minute: int, down: int, then: int = 1) -> dict[str, str]:
    """Busy, gone from `minute` on for `down` minutes, and busy again. Counters begin with what
    clients have counted that live on, and stores that these could not make are counted. `then`:
    starts that follow each other."""
    made = {}
    before, gap = f"x{minute - 1}", f"stale _x{down - 1}"
    for name, value in exported(status()).items():
        rise = BUSY.get(name, 0)
        after = f"{value + rise * minute / 2:g}+{rise:g}x{MINUTES - minute - down}"
        made[name] = f"{value:g}+{rise:g}{before} {gap} {after}"
    last = MINUTES - minute - down
    made["incarnation"] = f"3{before} {gap} {3 + then}x{last}"
    made['store_dropped_pages_total{reason="unreachable"}'] = f"0{before} {gap} 400x{last}"
    made["up"] = f"1{before} 0x{down - 1} 1x{last}"
    return made


def series(instance: str, values: Mapping[str, str | None]) -> list[dict[str, str]]:
    made = []
    for name, notation in values.items():
        if notation is None:
            continue
        word, _, labels = name.partition("{")
        full = word if word == "up" else f"kvwarehouse_{word}"
        rest = f",{labels.removesuffix('}')}" if labels else ""
        own = f'instance="{instance}",job="kvwarehouse"{rest}'
        made.append({"series": f"{full}{{{own}}}", "values": notation})
    return made


def text(name: str, label: str, before: str, now: str, since: int) -> dict[str, str]:
    """A text that changes at a minute."""
    rest = MINUTES - since
    return {
        f'{name}{{{label}="{before}"}}': f"1x{since - 1} 0x{rest}",
        f'{name}{{{label}="{now}"}}': f"0x{since - 1} 1x{rest}",
    }


def rising(name: str, a_minute: float, since: int) -> dict[str, str]:
    return {name: f"0x{since - 1} 0+{a_minute:g}x{MINUTES - since}"}


def once(name: str, by: float, at: int) -> dict[str, str]:
    return {name: f"0x{at - 1} {by:g}x{MINUTES - at}"}


SINCE = 20
"""The minute at which something begins to be wrong."""


@dataclass(frozen=True)
class Case:
    """What is other than in a busy daemon, and what follows `after` minutes later, but not at
    `not_yet`."""

    alert: str
    changes: Mapping[str, str | None]
    not_yet: int
    after: int
    says: str
    labels: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()  # alerts that fire with it
    alone: bool = False  # what is wrong is seen in daemons of others

    @property
    def instance(self) -> str:
        return self.labels.get("instance", self.alert.removeprefix("Kvwarehouse").lower())


CASES = [
    Case(
        "KvwarehouseDown",
        {
            **{name: f"{value:g}x{SINCE - 1} stale" for name, value in exported(status()).items()},
            "up": f"1x{SINCE - 1} 0x{MINUTES - SINCE}",
        },
        4,
        6,
        "down answers no scrape (up is 0): it does not run, or its core does not answer. "
        "Its engines go on, and compute every prompt.",
    ),
    Case(
        "KvwarehouseNotScraped",
        {**dict.fromkeys(exported(status())), "up": f"1x{SINCE - 1} stale"},
        14,
        16,
        "There is no target in the job `kvwarehouse`: absent(up) is 1.",
        {"instance": ""},
        alone=True,
    ),
    Case(
        "KvwarehouseNotServing",
        text("state", "state", "serving", "draining", SINCE),
        14,
        16,
        "notserving has been draining for 15 minutes, and takes no stores.",
        {"state": "draining"},
    ),
    Case(
        "KvwarehouseRestarts",
        {"incarnation": f"3x{SINCE - 1} 4x9 5x9 6x{MINUTES - SINCE - 20}"},
        19,
        22,
        "restarts was started 3 times within an hour.",
    ),
    Case(
        "KvwarehousePathsLost",
        {"paths_lost": f"0x{SINCE - 1} 1x{MINUTES}"},
        0,
        2,
        "Files or sockets of pathslost are gone, and it cannot put them back "
        "(kvwarehouse_paths_lost is 1).",
    ),
    Case(
        "KvwarehouseLoadsFail",
        rising('load_failed_pages_total{reason="timeout"}', 60, SINCE),
        14,
        26,
        "9.009% of the pages that clients of loadsfail find are not loaded: timeout. "
        "Engines compute them.",
        {"reason": "timeout"},
    ),
    Case(
        "KvwarehouseStoresDropped",
        rising('store_dropped_pages_total{reason="later"}', 100, SINCE),
        29,
        46,
        "12.44% of the shards of pages that clients of storesdropped want to store are dropped: "
        "later.",
        {"reason": "later"},
    ),
    Case(
        "KvwarehousePinsRefused",
        rising("pins_refused_total", 1, SINCE),
        15,
        20,
        "pinsrefused refused 15 pins within 15 minutes.",
    ),
    Case(
        "KvwarehouseCallsRefused",
        rising('refused_calls_total{reason="bad_token"}', 2, SINCE),
        15,
        30,
        "callsrefused refused 30 calls within 15 minutes: bad_token.",
        {"reason": "bad_token"},
    ),
    Case(
        "KvwarehouseConnectionsNearBound",
        {"grpc_connections": f"10x{SINCE - 1} 480x{MINUTES - SINCE}"},
        14,
        16,
        "93.75% of the connections that connectionsnearbound takes are in use. Beyond "
        "them nobody gets in.",
    ),
    Case(
        "KvwarehouseDamage",
        once("digest_mismatches_total", 1, SINCE),
        0,
        2,
        "Damaged copies in damage within an hour: 1, found by load. Each was a miss.",
        {"found_by": "load"},
    ),
    Case(
        "KvwarehouseDamageOften",
        once("quarantined_pages_total", 20, SINCE),
        0,
        2,
        "Damaged pages that damageoften took out within an hour: 20.",
        also=("KvwarehouseDamage",),
        alone=True,
    ),
    Case(
        "KvwarehouseNvmeUnhealthy",
        text("nvme_health", "health", "ok", "read_only", SINCE),
        4,
        6,
        "The NVMe tier of nvmeunhealthy is read_only. DRAM serves.",
        {"health": "read_only"},
    ),
    Case(
        "KvwarehouseNvmeErrors",
        once('nvme_errors_total{operation="read"}', 1, SINCE),
        0,
        2,
        "Operations (read) of the NVMe tier of nvmeerrors that failed within 30 minutes: 1.",
        {"operation": "read"},
    ),
    Case(
        "KvwarehouseNvmeBehind",
        rising('nvme_not_admitted_pages_total{reason="queue_full"}', 100, SINCE),
        14,
        30,
        "25% of the pages stored in nvmebehind find the write queue full. They stay in "
        "DRAM, and are lost if they leave it before they are written.",
    ),
    Case(
        "KvwarehouseHbmOff",
        text("hbm_health", "health", "off", "waiting", SINCE),
        14,
        16,
        "The HBM tier of hbmoff is waiting. DRAM serves.",
        {"health": "waiting"},
    ),
    Case(
        "KvwarehouseRemoteNotServing",
        text("remote_state", "state", "serving", "refused", SINCE),
        9,
        11,
        "The remote tier of remotenotserving is refused: puts, gets or both wait. "
        "DRAM and NVMe serve.",
        {"state": "refused"},
    ),
    Case(
        "KvwarehouseRemoteWorkerRestarts",
        {"remote_worker_starts_total": f"1x{SINCE - 1} 2 3 4 5x{MINUTES}"},
        2,
        6,
        "The remote worker of remoteworkerrestarts was started 4 times within 30 minutes.",
    ),
    Case(
        "KvwarehouseRemoteRunsDropped",
        rising('remote_dropped_runs_total{reason="queue_full"}', 10, SINCE),
        29,
        46,
        "25% of the runs of pages that remoterunsdropped wants to put are dropped: queue_full.",
        {"reason": "queue_full"},
    ),
    Case(
        "KvwarehouseRemoteReadsFail",
        rising('remote_fetches_total{end="late"}', 17, SINCE),
        14,
        31,
        "25% of the runs of pages that remotereadsfail wants from the store end as late. Engines "
        "wait for them, and compute.",
        {"end": "late"},
    ),
    Case(
        "KvwarehouseRemoteDamage",
        once('remote_damaged_objects_total{fault="digest"}', 2, SINCE),
        0,
        2,
        "remotedamage read 2 such objects within an hour, found by digest. Each was a miss from "
        "that page on.",
        {"fault": "digest"},
    ),
    Case(
        "KvwarehouseRemoteClearsUnknown",
        {"remote_epochs_age_seconds": f"3x{SINCE - 1} 60x{MINUTES - SINCE}"},
        9,
        11,
        "remoteclearsunknown has not been told by the store which namespaces were cleared (for 60 "
        "s; -1 is never). It could return what another host has cleared, and reads nothing.",
    ),
    Case(
        "KvwarehouseRemoteClearsOwed",
        {"remote_epochs_owed": f"0x{SINCE - 1} 2x{MINUTES - SINCE}"},
        9,
        11,
        "2 clears of remoteclearsowed are not in the store yet.",
    ),
    Case(
        "KvwarehouseIndexTooSmall",
        {'tier_used_bytes{tier="nvme"}': f"{1 << 34}x{SINCE - 1} {1 << 33}x{MINUTES - SINCE}"},
        59,
        62,
        "95% of the index of indextoosmall are in use, so that it, not memory, decides what stays.",
    ),
    Case(
        "KvwarehouseLedgerInMemory",
        text("ledger_health", "health", "ok", "in_memory", SINCE),
        9,
        11,
        "The ledger of ledgerinmemory is in_memory: its disk refuses writes.",
        {"health": "in_memory"},
    ),
    Case(
        "KvwarehouseKvEventsLost",
        once("kv_event_losses_total", 6, SINCE),
        0,
        2,
        "kveventslost said all its pages anew 6 times within an hour, because changes came "
        "faster than it sends them.",
    ),
]

QUIET = {
    "idle": steady(new(), {}),
    "healthy and idle with all that it can have": steady(status(), {}),
    "busy": steady(status(), BUSY),
    "restarted": restarted(SINCE, 3),
    "restarted twice within minutes": restarted(SINCE, 4, then=2),
    "first scraped": {name: f"_x{SINCE} {value}" for name, value in steady(new(), {}).items()}
    | {"up": f"1x{MINUTES}"},
    "recovering for ten minutes": steady(status(), BUSY)
    | {
        'state{state="recovering"}': f"1x9 0x{MINUTES}",
        'state{state="serving"}': f"0x9 1x{MINUTES}",
    },
    "drained for ten minutes": steady(status(), BUSY)
    | {
        'state{state="draining"}': f"0x{SINCE} 1x9 0x{MINUTES}",
        'state{state="serving"}': f"1x{SINCE} 0x9 1x{MINUTES}",
        **once('store_dropped_pages_total{reason="draining"}', 4000, SINCE + 5),
    },
    "eight ranks, of which each drops 3 % of what it stores": steady(
        status(),
        BUSY | {"stored_shards_total": 3200, 'store_dropped_pages_total{reason="later"}': 100},
    ),
    "one burst of stores, loads and calls": steady(status(), BUSY)
    | once('store_dropped_pages_total{reason="reserve_limit"}', 5000, SINCE)
    | once('load_failed_pages_total{reason="timeout"}', 5000, SINCE)
    | once('nvme_not_admitted_pages_total{reason="queue_full"}', 5000, SINCE)
    | once('refused_calls_total{reason="too_many_streams"}', 500, SINCE)
    | once('remote_dropped_runs_total{reason="queue_full"}', 5000, SINCE),
    "a remote store that is full, as it is while the oldest day goes": steady(status(), BUSY)
    | text("remote_state", "state", "serving", "full", SINCE),
    "a remote store out of reach for nine minutes": steady(status(), BUSY)
    | {
        'remote_state{state="failing"}': f"0x{SINCE} 1x8 0x{MINUTES}",
        'remote_state{state="serving"}': f"1x{SINCE} 0x8 1x{MINUTES}",
    },
    "a daemon that has just begun to ask what the fleet has cleared": steady(status(), BUSY)
    | {"remote_epochs_age_seconds": f"-1x5 3x{MINUTES}"},
    "a clear that the store took after nine minutes": steady(status(), BUSY)
    | {"remote_epochs_owed": f"0x{SINCE} 1x8 0x{MINUTES}"},
    "a remote worker that ended once": steady(status(), BUSY)
    | {"remote_worker_starts_total": f"1x{SINCE} 2x{MINUTES}"},
    "an index that is as small as its tiers": steady(status(), BUSY),
}


def firing(at: int, instance: str, *alerts: str) -> dict[str, Any]:
    """Exactly these fire then, of one daemon."""
    chosen = f'alertstate="firing",instance="{instance}"'
    return {
        "expr": f"count by (alertname) (ALERTS{{{chosen}}})",
        "eval_time": f"{at}m",
        "exp_samples": [
            {"labels": f'{{alertname="{each}"}}', "value": 1} for each in sorted(alerts)
        ],
    }


def expected(case: Case) -> dict[str, Any]:
    """The alert of a case, as who gets it sees it."""
    rule = ALERTS[case.alert]
    labels = {"instance": case.instance, "job": "kvwarehouse", **rule["labels"], **case.labels}
    said = {"exp_annotations": {**rule["annotations"], "description": case.says}}
    alert = {"exp_labels": {key: value for key, value in labels.items() if value}, **said}
    return {
        "alertname": case.alert,
        "eval_time": f"{SINCE + case.after}m",
        "exp_alerts": [alert],
    }


def fleet(cases: Sequence[Case], quiet: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """One test of promtool, with a daemon for each case, and those that must be quiet."""
    daemons: dict[str, Mapping[str, str | None]] = {**quiet}
    asked = []
    for case in cases:
        daemons[case.instance] = {**steady(status(), BUSY), **case.changes}
        asked += [
            firing(SINCE - 1, case.instance),
            firing(SINCE + case.not_yet, case.instance),
            firing(SINCE + case.after, case.instance, case.alert, *case.also),
        ]
    for name in quiet:
        ever = f'count_over_time(ALERTS{{alertstate="firing",instance="{name}"}}[{MINUTES}m])'
        never = {"expr": f"count by (alertname, instance) ({ever})", "exp_samples": []}
        asked.append({**never, "eval_time": f"{MINUTES - 1}m"})
    return {
        "interval": "1m",
        "input_series": [each for name in daemons for each in series(name, daemons[name])],
        "alert_rule_test": [expected(case) for case in cases],
        "promql_expr_test": asked,
    }


def run(folder: Path, *tests: dict[str, Any]) -> str:
    """What promtool says of them; "" is that all passed."""
    file = folder / "tests.yml"
    made = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    file.write_text(json.dumps(made), encoding="utf-8")  # JSON is YAML
    return said(program("promtool"), "test", "rules", str(file))[0]


def said(*command: str) -> tuple[str, str]:
    """What it says where it fails, and where it does not."""
    # It writes a database to the folder for temporary files: not to a disk.
    places = {"TMPDIR": "/dev/shm"} if os.access("/dev/shm", os.W_OK) else {}
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, **places},
    )  # fmt: skip
    text = ran.stdout + ran.stderr
    return ("", text) if ran.returncode == 0 else (text, "")


def test_rules_are_what_prometheus_takes() -> None:
    wrong, right = said(program("promtool"), "check", "rules", str(RULES))
    assert wrong == ""
    assert re.findall(r"(\d+) rules found", right) == [str(len(ALERTS))]


def test_every_alert_has_a_case() -> None:
    assert [case.alert for case in CASES] == list(ALERTS)


def test_each_alert_fires_in_its_case_and_says_what_it_saw_and_none_in_healthy_daemons(
    tmp_path: Path,
) -> None:
    alone = [fleet([case], {}) for case in CASES if case.alone]
    together = fleet([case for case in CASES if not case.alone], QUIET)
    assert run(tmp_path, together, *alone) == ""


def test_case_without_its_fault_is_refused(tmp_path: Path) -> None:
    """promtool looks: who changes what the cases are made of sees that they can fail."""
    whole = [replace(case, changes={}) for case in CASES[2:4]]
    refused = run(tmp_path, fleet(whole, {}))
    assert all(case.alert in refused for case in whole)


def test_alert_of_a_daemon_that_should_be_quiet_is_refused(tmp_path: Path) -> None:
    loud = {**steady(status(), BUSY), "paths_lost": f"1x{MINUTES}"}
    assert "KvwarehousePathsLost" in run(tmp_path, fleet([], {"loud": loud}))
