"""Prometheus scrapes two real daemons, one that is new and one with every part and some traffic,
and answers every query of our dashboards and alerts about both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.process import free_port
from kvwarehouse_bench.harness.serving import Serving
from testkit.prometheus import DASHBOARDS, Prometheus, program, selectors_in, targets

SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=16384
)
PAGES = 16
# Both daemons answer, and were asked often enough for a rate.
SCRAPED = 'min(up) == 1 and on () min(count_over_time(kvwarehouse_state{state="serving"}[1m])) > 2'
# What `use` did is in one.
COUNTED = " and on () ".join(
    f"sum(rate(kvwarehouse_{name}_total[1m])) > 0"
    for name in ("lookup_missed_pages", "loaded_pages", "nvme_written_records")
)


def use(client: kvw.Client) -> None:
    """Pages that are stored, found, loaded and missed."""
    opened = client.open(SPACE)
    tokens = np.arange(PAGES * SPACE.page_tokens)
    pages = np.ones((PAGES, SPACE.page_bytes), np.uint8)
    assert opened.store(tokens, pages, timeout_s=60).stored == PAGES
    out = np.zeros_like(pages)
    assert opened.load(tokens, out, timeout_s=60) == PAGES
    assert opened.lookup(tokens).pages == PAGES
    assert opened.lookup(tokens + 1).pages == 0


def of_a_fleet(folder: Path) -> dict[str, str]:
    """Settings of a daemon with a remote tier."""
    store, secret = folder / "store", folder / "secret"
    store.mkdir()
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    remote = {"remote": f"file://{store}", "remote_capacity": "1GiB"}
    return {**remote, "fleet_secret": str(secret)}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Of the daemons "new" and "used"."""
    program("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    settings = {"nvme_capacity": "64MiB", "kv_events": f"tcp://127.0.0.1:{free_port()}"}
    settings |= of_a_fleet(folder)
    with Serving(folder / "new") as new, Serving(folder / "used", **settings) as used:
        daemons = {"new": new, "used": used}
        addresses = {
            name: str(daemon.events("ready")[0]["http"]) for name, daemon in daemons.items()
        }
        with Prometheus(folder, addresses) as prometheus, used.connect() as client:
            prometheus.wait_for(SCRAPED)  # what was counted before is in no rate
            use(client)
            client.flush()
            prometheus.stop_at(f"{SCRAPED} and on () {COUNTED}")
            yield prometheus


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
@pytest.mark.parametrize("daemon", ["new", "used", "new|used"])
def test_every_query_of_a_dashboard_has_numbers(
    watched: Prometheus, dashboard: Path, daemon: str
) -> None:
    empty, words = [], []
    for target in targets(dashboard):
        found = [value for _, value in watched.query(target.of(daemon))]
        if not found:
            empty.append((target.panel, target.query))
        if any(math.isnan(value) or math.isinf(value) for value in found):
            words.append(target)
    assert empty == []
    assert all(target.may_be_nan for target in words)
    assert daemon == "new" or words == []


def test_every_series_that_an_alert_looks_at_is_there(watched: Prometheus) -> None:
    missing = [
        (rule["name"], selector)
        for rule in watched.rules()
        for selector in selectors_in(rule["query"])
        if not watched.query(f'{selector} and on (instance) up{{instance="used"}}')
    ]
    assert missing == []


def test_no_alert_is_about_to_fire_and_none_fails(watched: Prometheus) -> None:
    """Without waiting for how long each has to hold."""
    for rule in watched.rules():
        assert watched.query(rule["query"]) == [], rule["name"]
        assert rule["health"] != "err", rule["lastError"]


def test_hit_rate_of_the_overview_is_what_clients_saw(watched: Prometheus) -> None:
    [overview] = [path for path in DASHBOARDS if "overview" in path.stem]
    [target] = [each for each in targets(overview) if each.panel == "Hit rate"]
    [(_, rate)] = watched.query(target.of("used"))
    assert 0 < rate < 1


def test_no_alert_is_about_to_fire_when_a_daemon_is_back(tmp_path: Path) -> None:
    """It was killed, and its client went on. Again without waiting."""
    program("prometheus")
    settings = {"nvme_capacity": "64MiB", "http": f"127.0.0.1:{free_port()}"}
    with (
        Serving(tmp_path / "daemon", **settings) as daemon,
        Prometheus(tmp_path, {"daemon": settings["http"]}) as prometheus,
        daemon.connect() as client,
    ):
        prometheus.wait_for(SCRAPED)
        use(client)
        prometheus.wait_for("kvwarehouse_loaded_pages_total > 0")
        daemon.kill()
        daemon.start()
        again = "kvwarehouse_incarnation - min_over_time(kvwarehouse_incarnation[1m]) == 1"
        prometheus.stop_at(f"{again} and on () {SCRAPED}")
        for rule in prometheus.rules():
            assert prometheus.query(rule["query"]) == [], rule["name"]
