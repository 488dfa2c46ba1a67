"""The scrape: parsable, complete, closed labels, sums that hold."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvwarehouse.daemon import metrics
from kvwarehouse.wire import status_pb2


def snapshot() -> status_pb2.Status:
    """Of an idle core."""
    status = status_pb2.Status(name='a "name"\\', version="1.0", state="serving")
    status.core.tiers.nvme.health = "ok"
    status.service.ledger_health = "ok"
    status.kv_events.SetInParent()
    status.remote.SetInParent()
    return status


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_scrape_has_every_metric_and_parses() -> None:
    found = samples(metrics.render(snapshot()))
    names = {name for name, _ in found}
    assert names == set(metrics.METRICS)
    info = next(labels for name, labels in found if name == "kvwarehouse_info")
    assert dict(info)["name"] == 'a "name"\\'


def test_every_metric_has_a_help() -> None:
    assert [name for name, metric in metrics.METRICS.items() if not metric.help] == []


def test_hits_of_all_tiers_and_misses_are_the_pages_asked() -> None:
    values = snapshot()
    lookups = values.core.lookups
    lookups.pages_hit_hbm, lookups.pages_hit_dram, lookups.pages_hit_nvme = 4, 5, 3
    lookups.pages_hit_remote, lookups.pages_missed = 1, 2
    found = samples(metrics.render(values))
    hits = sum(v for (name, _), v in found.items() if name == "kvwarehouse_lookup_hit_pages_total")
    assert hits == 13
    assert hits + found[("kvwarehouse_lookup_missed_pages_total", ())] == 15


def test_reason_outside_the_closed_set_counts_as_other() -> None:
    values = snapshot()
    values.core.stores.dropped.update({"no_room": 2, "of a newer core": 3, "another": 4})
    found = samples(metrics.render(values))
    name = "kvwarehouse_store_dropped_pages_total"
    by_reason = {dict(labels)["reason"]: v for (n, labels), v in found.items() if n == name}
    assert by_reason["no_room"] == 2
    assert by_reason["other"] == 7
    assert set(by_reason) == set(metrics.METRICS[name].values)


@pytest.mark.parametrize("health", ["ok", "read_only", "something new"])
def test_exactly_one_health_is_set(health: str) -> None:
    values = snapshot()
    values.core.tiers.nvme.health = health
    found = samples(metrics.render(values))
    on = [labels for (n, labels), v in found.items() if n == "kvwarehouse_nvme_health" and v]
    assert [dict(labels)["health"] for labels in on] == [
        health if health in ("ok", "read_only") else "other"
    ]


def test_what_is_not_known_yet_is_left_out_and_not_zero() -> None:
    text = metrics.render(status_pb2.Status(name="n", version="1", state="recovering"))
    names = {name for name, _ in samples(text)}
    assert names == {"kvwarehouse_state", "kvwarehouse_problems"}


def test_remote_tier_counts_puts_by_result_and_joins_the_tiers() -> None:
    values = snapshot()
    values.remote.state = "full"
    values.remote.capacity_bytes, values.remote.used_bytes = 100, 95
    values.remote.puts.update({"stored": 7, "of a newer worker": 2})
    values.core.remote_puts.dropped["queue_full"] = 3
    found = samples(metrics.render(values))
    assert found[("kvwarehouse_remote_state", (("state", "full"),))] == 1
    assert found[("kvwarehouse_tier_capacity_bytes", (("tier", "remote"),))] == 100
    assert found[("kvwarehouse_tier_used_bytes", (("tier", "remote"),))] == 95
    assert found[("kvwarehouse_remote_puts_total", (("result", "stored"),))] == 7
    assert found[("kvwarehouse_remote_puts_total", (("result", "other"),))] == 2
    assert found[("kvwarehouse_remote_dropped_runs_total", (("reason", "queue_full"),))] == 3


def test_remote_tier_counts_gets_by_result_and_what_is_damaged_by_fault() -> None:
    values = snapshot()
    values.remote.gets.update({"filled": 5, "of a newer worker": 1})
    values.remote.damaged["digest"] = 2
    values.remote.epochs_owed, values.remote.epochs_ago_s = 1, 3.5
    values.remote.read_bytes_per_s, values.remote.first_byte_ms = 1000, 250.0
    values.core.remote_fetches.ends["late"] = 4
    values.core.lookups.pages_hit_remote = 6
    found = samples(metrics.render(values))
    assert found[("kvwarehouse_remote_gets_total", (("result", "filled"),))] == 5
    assert found[("kvwarehouse_remote_gets_total", (("result", "other"),))] == 1
    assert found[("kvwarehouse_remote_damaged_objects_total", (("fault", "digest"),))] == 2
    assert found[("kvwarehouse_remote_epochs_owed", ())] == 1
    assert found[("kvwarehouse_remote_epochs_age_seconds", ())] == 3.5
    assert found[("kvwarehouse_remote_read_bytes_per_second", ())] == 1000
    assert found[("kvwarehouse_remote_first_byte_seconds", ())] == 0.25
    assert found[("kvwarehouse_remote_fetches_total", (("end", "late"),))] == 4
    assert found[("kvwarehouse_lookup_hit_pages_total", (("tier", "remote"),))] == 6


def test_daemon_without_a_remote_tier_has_no_state_of_one() -> None:
    values = snapshot()
    values.ClearField("remote")
    names = {name for name, _ in samples(metrics.render(values))}
    assert "kvwarehouse_remote_state" not in names
    assert "kvwarehouse_remote_puts_total" not in names
    assert "kvwarehouse_remote_queued_runs" in names  # the core's, 0
