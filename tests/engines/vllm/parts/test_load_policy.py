"""Load or compute: by the engine's own steps and what the tiers have delivered."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import kvwarehouse as kvw
import kvwarehouse_connectors.vllm.load_policy as load_policy
from kvwarehouse_connectors.core.prefix_matcher import GroupHit, PrefixHit
from kvwarehouse_connectors.vllm.cache_layout import cache_groups
from kvwarehouse_connectors.vllm.load_policy import LoadPolicy
from kvwarehouse_connectors.vllm.messages import StepResults
from kvwarehouse_connectors.vllm.settings import read_settings
from vllm_parts.spaces import space_of
from vllm_parts.specs import config, full, window

GROUPS = cache_groups(config(full(16), window(16, 64), hash_tokens=16))
PAGE = 1 << 20
SPACES = [space_of(place, group, PAGE) for place, group in enumerate(GROUPS)]
DRAM, NVME, REMOTE = kvw.Tier.DRAM, kvw.Tier.NVME, kvw.Tier.REMOTE


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(load_policy, "time", clock)
    return clock


def control(**more: int) -> kvw.Control:
    values = {
        "incarnation": 1,
        "heartbeat_age_s": 0.0,
        "draining": False,
        "nvme_read_bytes_per_s": 0,
        "nvme_reads_queued": 0,
        "nvme_write_queue_bytes": 0,
        "reserve_limit_bytes": 1 << 30,
        "pin_limit_bytes": 1 << 30,
    }
    return kvw.Control(**{**values, **more})  # type: ignore[arg-type]


def policy(tokens_per_s: float = 0, *, load: str = "worth", spaces: int = 1) -> LoadPolicy:
    extra = {"kvwarehouse.load": load, "kvwarehouse.prefill_tokens_per_s": tokens_per_s}
    return LoadPolicy(read_settings(extra, "kv_both"), SPACES[:spaces], GROUPS[:spaces], "cpu")


def hit(*tiers: tuple[kvw.Tier, int], local: int = 0) -> PrefixHit:
    """A prefix in the first group alone."""
    every = np.repeat([int(t) for t, _ in tiers], [n for _, n in tiers]).astype(np.uint8)
    begin = local // 16
    end = begin + len(every)
    return PrefixHit(local, end * 16, (GroupHit(0, begin, end, every),))


def delivers(chosen: LoadPolicy, *, dram: float = 0, nvme: float = 0) -> None:
    for _ in range(50):
        chosen.delivered(StepResults(load_bytes_per_s=dram, nvme_bytes_per_s=nvme))


def test_slow_engine_loads_all_and_fast_one_nothing(clock: Clock) -> None:
    where = hit((DRAM, 20), (NVME, 20))
    assert policy(100).worth_tokens(where, control()) == where.tokens
    assert policy(1e8).worth_tokens(where, control()) == 0


def test_load_is_cut_where_the_disk_begins_when_that_is_too_slow(clock: Clock) -> None:
    chosen = policy(20_000)  # 0.8 ms a page; 1 MiB takes 0.26 ms from DRAM
    delivers(chosen, dram=4e9, nvme=1e8)
    assert chosen.worth_tokens(hit((DRAM, 50), (NVME, 50)), control()) == 800
    assert chosen.worth_tokens(hit((DRAM, 50), (NVME, 50), local=160), control()) == 960


def test_disk_that_was_too_slow_is_tried_again_after_a_while(clock: Clock) -> None:
    chosen = policy(20_000)
    delivers(chosen, dram=4e9, nvme=1e8)
    where = hit((DRAM, 50), (NVME, 50))
    assert chosen.worth_tokens(where, control()) == 800
    clock.now_s += 1.9
    assert chosen.worth_tokens(where, control()) == 800
    clock.now_s += 0.2
    assert chosen.worth_tokens(where, control()) == where.tokens, "one tries"
    assert chosen.worth_tokens(where, control()) == 800, "the others wait for how it goes"


def test_disk_that_recovered_is_used_again_as_soon_as_one_load_shows_it(clock: Clock) -> None:
    chosen = policy(20_000)
    delivers(chosen, dram=4e9, nvme=1e6)
    where = hit((DRAM, 50), (NVME, 50))
    assert chosen.worth_tokens(where, control()) == 800
    chosen.delivered(StepResults(nvme_bytes_per_s=5e9))
    assert chosen.worth_tokens(where, control()) == where.tokens


def test_short_prompt_on_disk_does_not_turn_the_disk_off_for_others(clock: Clock) -> None:
    chosen = policy(20_000)
    fast = control(nvme_read_bytes_per_s=5 * 10**9)
    assert chosen.worth_tokens(hit((NVME, 1)), fast) == 0
    where = hit((DRAM, 50), (NVME, 50))
    assert chosen.worth_tokens(where, fast) == where.tokens


def test_reads_that_wait_at_the_disk_count_against_it(clock: Clock) -> None:
    chosen = policy(1_000)
    where = hit((NVME, 50))  # 0.8 s to compute, 0.05 s to read
    assert chosen.worth_tokens(where, control(nvme_read_bytes_per_s=10**9)) == where.tokens
    clock.now_s += 10
    queued = control(nvme_read_bytes_per_s=10**9, nvme_reads_queued=2_000)
    assert chosen.worth_tokens(where, queued) == 0


@pytest.mark.parametrize("load", ["worth", "always"])
def test_pages_on_disk_are_not_promised_without_a_daemon_to_read_them(
    load: str, clock: Clock
) -> None:
    chosen = policy(100, load=load)
    assert chosen.worth_tokens(hit((DRAM, 5), (NVME, 5)), None) == 80
    assert chosen.worth_tokens(hit((NVME, 5)), None) == 0
    assert chosen.worth_tokens(hit((DRAM, 5)), None) == 80


def test_always_loads_whatever_is_there_without_a_schedule(clock: Clock) -> None:
    chosen = policy(1e9, load="always")
    where = hit((DRAM, 5), (NVME, 5))
    assert chosen.worth_tokens(where, control()) == where.tokens
    assert chosen.page_compute_s(where) == 0


def test_schedule_of_a_load_is_the_engines_own_pace(clock: Clock) -> None:
    assert policy(1_600).page_compute_s(hit((DRAM, 5), local=64)) == pytest.approx(0.01)


def test_pages_of_all_groups_share_the_time_of_the_first(clock: Clock) -> None:
    """A window needs few blocks of its own: they are read too, for the same tokens."""
    spans = (
        GroupHit(0, 0, 10, np.full(10, int(DRAM), np.uint8)),
        GroupHit(1, 6, 10, np.full(4, int(DRAM), np.uint8)),
    )
    both = PrefixHit(0, 160, spans)
    slow_dram = 1.2 * PAGE / 0.01  # 1.2 pages in the time of computing a block
    chosen = policy(1_600, spaces=2)
    delivers(chosen, dram=slow_dram)
    assert chosen.worth_tokens(both, control()) == 0
    assert chosen.worth_tokens(PrefixHit(0, 160, spans[:1]), control()) == 160


def test_rate_is_measured_on_the_engines_own_steps(clock: Clock) -> None:
    chosen = policy(1.0)
    for _ in range(3):
        chosen.step_begins({"a": 1_600})
        clock.now_s += 1.0
        chosen.step_ends()
    assert chosen.page_compute_s(hit((DRAM, 5))) == pytest.approx(0.01)


def test_step_that_waited_for_the_one_before_it_began_when_that_ended(clock: Clock) -> None:
    """Asynchronous scheduling: two steps under way, each taking a second."""
    chosen = policy(1.0)
    chosen.step_begins({"a": 1_600})
    chosen.step_begins({"a": 1_600})
    for _ in range(3):
        clock.now_s += 1.0
        chosen.step_ends()
        chosen.step_begins({"a": 1_600})
    assert chosen.page_compute_s(hit((DRAM, 5))) == pytest.approx(0.01)


def test_end_of_a_step_that_never_began_is_no_measurement(clock: Clock) -> None:
    chosen = policy(1_600)
    chosen.step_ends()
    assert chosen.page_compute_s(hit((DRAM, 5))) == pytest.approx(0.01)


def test_steps_whose_end_is_never_told_are_bounded(clock: Clock) -> None:
    chosen = policy(1.0)
    for _ in range(10_000):
        chosen.step_begins({"a": 1_600})
    assert len(chosen._steps) <= 8


# --- the remote store


def test_remote_store_is_used_as_fast_as_the_daemon_says(clock: Clock) -> None:
    chosen = policy(1_000)  # 16 ms a page of 1 MiB
    where = hit((DRAM, 50), (REMOTE, 50))
    fast = control(remote_read_bytes_per_s=10**9, remote_first_byte_ns=10**7)
    assert chosen.worth_tokens(where, fast) == where.tokens
    assert policy(1_000).worth_tokens(where, control(remote_read_bytes_per_s=10**6)) == 800
    late = control(remote_read_bytes_per_s=10**9, remote_first_byte_ns=10**10)
    assert policy(1_000).worth_tokens(where, late) == 800
    queued = control(remote_read_bytes_per_s=10**9, remote_queued_bytes=10**10)
    assert policy(1_000).worth_tokens(where, queued) == 800


def test_remote_store_that_was_too_slow_is_tried_again_until_the_daemon_says_otherwise(
    clock: Clock,
) -> None:
    chosen = policy(1_000)
    where = hit((DRAM, 50), (REMOTE, 50))
    slow = control(remote_read_bytes_per_s=10**6)
    assert chosen.worth_tokens(where, slow) == 800
    clock.now_s += 1.9
    assert chosen.worth_tokens(where, slow) == 800
    clock.now_s += 0.2
    assert chosen.worth_tokens(where, slow) == where.tokens, "one tries"
    assert chosen.worth_tokens(where, slow) == 800, "the others wait for how it goes"
    assert chosen.worth_tokens(where, control(remote_read_bytes_per_s=10**9)) == where.tokens


@pytest.mark.parametrize("load", ["worth", "always"])
def test_remote_store_is_not_promised_without_a_daemon(load: str, clock: Clock) -> None:
    chosen = policy(100, load=load)
    assert chosen.worth_tokens(hit((DRAM, 50), (REMOTE, 50)), None) == 800
    if load == "always":
        assert chosen.worth_tokens(hit((REMOTE, 50)), control()) == 800
