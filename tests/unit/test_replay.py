"""`kvwarehouse replay`: answers computed by hand, by a plain LRU and by another simulator, and the
public trace."""

from __future__ import annotations

import importlib
import itertools
import json
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse import core
from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.model.catalogue import find_model
from kvwarehouse.model.footprint import Footprint, find_dtype
from kvwarehouse.planning.hardware import TierSpeed
from kvwarehouse.planning.interval import quantity
from kvwarehouse.planning.latency import load_seconds
from kvwarehouse.planning.replay import ReplaySetup, compared, run_replay, sweep, sweep_sizes
from kvwarehouse.trace.trace import Trace, TraceBuilder, TraceRequest

# A public trace that stands beside a checkout, never in it.
PUBLIC_TRACE = Path(__file__).parents[3] / "shared" / "data" / "mooncake_synthetic_trace.jsonl"

SHAPE = ("--layers", "5", "--kv-heads", "1", "--head-dim", "50")  # 1,000 bytes a token


def trace_of(*chains: list[int]) -> Trace:
    builder = TraceBuilder()
    for at, chain in enumerate(chains):
        builder.add(TraceRequest(float(at), 512 * len(chain), 1, chain))
    return builder.build("test", "mooncake", 512)


def plain_lru(chains: list[list[int]], capacity: int | None) -> int:
    """Pages hit in prefix order: the slow and obvious way."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for chain in chains:
        for block in chain:
            if block not in cache:
                break
            hits += 1
        for block in chain:
            cache[block] = None
            cache.move_to_end(block)
            if capacity is not None and len(cache) > capacity:
                cache.popitem(last=False)
    return hits


def prompts(rng: random.Random, requests: int) -> list[list[int]]:
    """Conversations that grow, over a shared root: a block's parent is always the same."""
    conversations: list[list[int]] = [[0]]
    made, fresh = [], 1
    for _ in range(requests):
        base = rng.choice(conversations[-12:])
        grown = base + list(range(fresh, fresh + rng.randint(1, 5)))
        fresh = grown[-1] + 1
        conversations.append(grown)
        made.append(grown)
    return made


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(*chains: list[int], step_ms: int = 1000) -> str:
        path = tmp_path / "trace.jsonl"
        lines = [
            {
                "timestamp": at * step_ms,
                "input_length": 512 * len(chain),
                "output_length": 1,
                "hash_ids": chain,
            }
            for at, chain in enumerate(chains)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return written


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> Any:
        assert main(["replay", *arguments, "--json"]) == Exit.OK
        return json.loads(capsys.readouterr().out)

    return run


# --- hits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 2, 5, 17, 60, 200, None])
def test_lru_hits_what_a_plain_lru_hits(rng: random.Random, capacity: int | None) -> None:
    chains = prompts(rng, 120)
    run = run_replay(trace_of(*chains), ReplaySetup(dram_pages=capacity))
    assert run.hits == plain_lru(chains, capacity)


def test_hit_rate_is_pages_hit_in_prefix_order_over_pages_asked(write: Any, replay: Any) -> None:
    # 7 asked; 2 hits of the second request, none behind the gap of the third.
    found = replay(write([1, 2], [1, 2, 3], [9, 2]))
    assert (found["hits"], found["asked"], found["misses"]) == (2, 7, 5)
    assert found["hit_rate"] == pytest.approx(2 / 7)


@pytest.mark.parametrize("policy", core.policy_names())
@pytest.mark.parametrize("leaves_first", [False, True])
def test_no_policy_beats_the_endless_cache_and_all_reach_it(
    rng: random.Random, policy: str, leaves_first: bool
) -> None:
    trace = trace_of(*prompts(rng, 150))
    most = run_replay(trace, ReplaySetup()).hit_rate
    for pages in (3, 30, trace.ids):
        rate = run_replay(trace, ReplaySetup(policy, pages, 0, leaves_first)).hit_rate
        assert rate <= most
    assert rate == most


def test_s3fifo_keeps_what_is_used_through_a_scan_that_lru_loses() -> None:
    chains: list[list[int]] = []
    scanned = 1000
    for _ in range(40):
        chains += [[1, 2, 3], [1, 2, 3]]
        chains += [[scanned + at] for at in range(30)]
        scanned += 30
    trace = trace_of(*chains)
    rates = {
        policy: run_replay(trace, ReplaySetup(policy, 20)).hit_rate for policy in ("lru", "s3fifo")
    }
    assert rates["s3fifo"] > rates["lru"]


def test_nvme_serves_what_dram_has_lost(write: Any, replay: Any) -> None:
    path = write([1, 2], [3, 4], [1, 2], [1, 2], step_ms=21_600_000)  # 6 hours
    found = replay(path, "--dram-pages", "2", "--nvme-pages", "8", "--page-bytes", "1MiB")
    assert found["tiers"]["dram"]["hits"] == 2
    assert found["tiers"]["nvme"]["hits"] == 2
    assert found["tiers"]["nvme"]["pages_written"] == 4
    assert found["tiers"]["nvme"]["bytes_written"] == 4 * 1024**2
    # 4 pages of 8 in 18 hours.
    assert found["tiers"]["nvme"]["drive_writes_per_day"] == pytest.approx(4 / 8 / 0.75)
    rates = found["tiers"]["dram"]["hit_rate"] + found["tiers"]["nvme"]["hit_rate"]
    assert rates == pytest.approx(found["hit_rate"])


@pytest.mark.parametrize("budget", ["3.0", "24MiB"])
def test_write_budget_goes_to_what_is_asked_for_again(budget: str, write: Any, replay: Any) -> None:
    path = write([1, 2, 3], [1, 2, 4], [5], [1, 2], step_ms=3_600_000)
    tiers = ("--dram-pages", "1", "--nvme-pages", "8", "--page-bytes", "1MiB")
    found = replay(path, *tiers, "--nvme-writes-per-day", budget)
    # 24 pages a day, of which 12 are there and one comes in each hour: for pages 1 and 2.
    assert found["tiers"]["nvme"]["pages_written"] == 2
    assert found["tiers"]["nvme"]["pages_spared"] == 5
    assert found["write_budget"] == {
        "pages_per_day": 24,
        "hit_rate_without": replay(path, *tiers)["hit_rate"],
        "pages_written_without": 5,
    }
    assert found["hit_rate"] < found["write_budget"]["hit_rate_without"]


def test_sizes_in_bytes_are_pages_of_the_model(write: Any, replay: Any) -> None:
    found = replay(write([1, 2]), *SHAPE, "--dram", "512MB", "--nvme", "5GB")
    assert found["page_bytes"] == 512_000
    assert (found["dram_pages"], found["nvme_pages"]) == (1000, 9765)


def test_sweep_is_the_curve_of_single_replays(rng: random.Random) -> None:
    trace = trace_of(*prompts(rng, 100))
    sizes = sweep_sizes(trace)
    assert sizes[-1] == trace.ids
    for pages, rate in sweep(trace, ReplaySetup(), sizes):
        assert rate == run_replay(trace, ReplaySetup(dram_pages=pages)).hit_rate


def test_compare_and_sweep_show_every_policy_in_both_orders(
    write: Any, replay: Any, tmp_path: Path
) -> None:
    page = tmp_path / "curve.html"
    path = write([1, 2, 3], [1, 2, 4], [1, 2, 3])
    found = replay(path, "--compare", "--sweep", "1,3,4", "--html", str(page))
    shown = {(each["policy"], each["order"]) for each in found["compared"]}
    policies = {
        (name, order) for name in ("lru", "adaptive", "s3fifo") for order in ("pages", "leaves")
    }
    assert shown == {*policies, ("opt", "leaves")}
    assert [point["dram_pages"] for point in found["sweep"][0]["points"]] == [1, 3, 4]
    assert page.read_text().count("<polyline") == 7


def test_times_to_first_token_are_predicted_with_their_range(write: Any, replay: Any) -> None:
    path = write([1, 2], [1, 2])
    rates = ("--prefill-tokens-per-s", "1000", "--dram-read", "10MB")
    found = replay(path, *SHAPE, *rates)["first_token_seconds"]
    # The second request loads all but the one token that is always computed.
    loaded = 2 * 512_000 / 10e6 + 50e-6 + 0.001
    assert found["mean"]["recomputed"]["value"] == pytest.approx(1.024)
    assert found["mean"]["loaded"]["value"] == pytest.approx((1.024 + loaded) / 2)
    assert found["p99"]["loaded"]["low"] < found["p99"]["loaded"]["value"]
    assert found["p50"]["loaded"]["assumption"]


def test_skipped_lines_are_counted_in_the_answer(write: Any, replay: Any) -> None:
    path = write([1, 2], [1, 2])
    with Path(path).open("a") as opened:
        opened.write("oops\n")
    found = replay(path, "--skip-bad")
    assert found["skipped"] == 1
    assert ":3: not JSON" in found["complaints"][0]


def test_recording_replays_like_the_trace_it_was_made_of(
    rng: random.Random, write: Any, replay: Any, tmp_path: Path
) -> None:
    path, copy = write(*prompts(rng, 60)), str(tmp_path / "copy.jsonl")
    first = replay(path, "--dram-pages", "40", "--record", copy)
    assert replay(copy, "--dram-pages", "40")["hit_rate"] == first["hit_rate"]


def test_table_says_where_pages_came_from(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = write([1, 2], [1, 2])
    assert main(["replay", path, "--nvme-pages", "5", "--sweep", "--compare"]) == Exit.OK
    out = capsys.readouterr().out
    for word in ("50.0%", "computed", "Hit rate by size", "leaves first"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "mru"), "known: lru, adaptive, s3fifo, opt"),
        (("--dram-pages", "0"), "--dram-pages 0"),
        (("--nvme-pages", "-3"), "--nvme-pages -3"),
        (("--dram", "64GiB"), "--page-bytes"),
        (("--dram", "64G", "--page-bytes", "1MiB"), "--dram '64G'"),
        (("--dram", "1KiB", "--page-bytes", "1MiB"), "--dram 1KiB holds no page"),
        (("--page-bytes", "0"), "--page-bytes 0"),
        (("--model", "mamba-2.8b"), "keeps no KV per token"),
        (("--sweep", "1,x"), "--sweep 'x'"),
        (("--sweep", "0"), "--sweep 0"),
        (("--block-tokens", "0"), "--block-tokens 0"),
        (("--nvme-writes-per-day", "1.0"), "--nvme-pages"),
        (("--nvme-writes-per-day", "1GB", "--nvme-pages", "9"), "--page-bytes"),
        (("--nvme-writes-per-day", "much", "--nvme-pages", "9"), "'much'"),
        (("--session-gap", "-1"), "--session-gap -1"),
        (("--record", "/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_replay_refuses_and_names_the_value(
    write: Any, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", write([1]), *arguments]) == Exit.USAGE
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


# --- the optimum ----------------------------------------------------------------------------------


def most_by_trying(chains: list[list[int]], capacity: int) -> int:
    """Whatever can be kept after each request is: pages that were there or came, in any choice."""
    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for chain in chains:
        after: dict[frozenset[int], int] = {}
        for kept, hits in reached.items():
            found = hits + len(list(itertools.takewhile(kept.__contains__, chain)))
            there = sorted(kept.union(chain))
            for size in range(min(capacity, len(there)) + 1):
                for choice in map(frozenset, itertools.combinations(there, size)):
                    after[choice] = max(after.get(choice, 0), found)
        reached = after
    return max(reached.values())


def test_optimum_is_the_best_of_all_that_can_be_tried(rng: random.Random) -> None:
    for capacity in (1, 2, 3):
        tree = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [5], [5, 6]]
        chains = [rng.choice(tree) for _ in range(12)]
        run = run_replay(trace_of(*chains), ReplaySetup("opt", capacity))
        assert run.hits == most_by_trying(chains, capacity)


@pytest.mark.parametrize("nvme_pages", [0, 40])
def test_no_policy_beats_the_optimum(rng: random.Random, nvme_pages: int) -> None:
    trace = trace_of(*prompts(rng, 200))
    before = 0.0
    for pages in (1, 5, 30, 100, None):
        *policies, most = (
            run_replay(trace, each)
            for each in compared(ReplaySetup(dram_pages=pages, nvme_pages=nvme_pages))
        )
        assert most.setup.policy == "opt"
        assert all(run.hit_rate <= most.hit_rate for run in policies)
        assert all(run.tier_rate("dram") <= most.tier_rate("dram") for run in policies)
        assert before <= most.hit_rate
        before = most.hit_rate
    assert before == run_replay(trace, ReplaySetup()).hit_rate


def test_optimum_of_two_tiers_stays_a_rate_where_ids_are_no_prefixes() -> None:
    # 2 stands behind 3 and behind 1. With the second tier a request hit less than without, and
    # what was taken off wrapped round: a hit rate of forty million.
    trace = trace_of([0], [4, 3, 2], [1], [2, 3], [0], [4, 1, 2])
    dram, both = (run_replay(trace, ReplaySetup("opt", 1, pages)) for pages in (0, 1))
    assert dram.hit_rate <= both.hit_rate <= 1


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-27b", "qwen3-next-80b-a3b"])
def test_a_hit_is_loaded_as_in_plan(write: Any, replay: Any, model: str) -> None:
    # Windows were loaded as if they looked back over everything, and states not at all.
    # The first request computes 4,096 tokens, the second loads them and computes 512 more.
    path = write([*range(8)], [*range(9)])
    arguments = ("--model", model, "--prefill-tokens-per-s", "1000", "--dram-read", "1GB")

    def loads_s(*more: str) -> float:
        times = replay(path, *arguments, *more)["first_token_seconds"]["mean"]
        return float(times["loaded"]["value"]) * 2 - 4.096 - 0.512

    footprint = Footprint(find_model(model), find_dtype("fp16"))
    tier = TierSpeed("dram", quantity(1e9), quantity(1e9), quantity(50e-6), "")
    assert loads_s() == pytest.approx(load_seconds(footprint, tier, 4096).value)
    assert loads_s("--page-bytes", "512MiB") == pytest.approx(50e-6 + 8 * 512 * 2**20 / 1e9)


@pytest.mark.parametrize(
    ("policy", "named", "sizes"), [("opt", "optimal", (20, 100, 400)), ("lru", "lru", (400, 500))]
)
def test_hits_are_those_of_another_simulator(
    rng: random.Random, write: Any, policy: str, named: str, sizes: tuple[int, ...]
) -> None:
    """kvcache-simulator counts the hits of a trace's second half, if its cache is full by then. Of
    a prompt that is larger than the cache its LRU keeps other pages, and one fewer."""
    simulator = pytest.importorskip("kvcache_sim.policies", reason="kvcache-simulator is missing")
    plans, traces = (importlib.import_module(f"kvcache_sim.{name}") for name in ("plan", "trace"))
    chains = prompts(rng, 500)
    for capacity in sizes:
        with Path(write(*chains)).open() as opened:
            read = traces.parse_trace_lines(opened, block_size=512)
        plan = plans.build_execution_plan(read, warmup_fraction=0.5)
        other = simulator.simulate_policy(plan, named, capacity)
        assert other.measurementMode == "fixed_window"
        run = run_replay(trace_of(*chains), ReplaySetup(policy, capacity, leaves_first=True))
        assert run.dram_hits[plan.warmup_requests :].sum() * 512 == other.hitTokens


def test_table_says_how_much_of_the_most_possible_each_policy_hits(
    write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write([1], [2], [1], [3], [1], [2])
    assert main(["replay", path, "--dram-pages", "1", "--compare"]) == Exit.OK
    assert "opt knows the future" in capsys.readouterr().out
    assert main(["replay", path, "--dram-pages", "1", "--policy", "opt"]) == Exit.OK
    out = capsys.readouterr().out
    assert "33.3% of 6 pages hit" in out
    assert "pages written" not in out


# --- the public trace -----------------------------------------------------------------------------


@pytest.mark.skipif(not PUBLIC_TRACE.exists(), reason="the public trace is not beside the checkout")
def test_public_trace_has_the_published_hit_rates(replay: Any) -> None:
    found = replay(str(PUBLIC_TRACE), "--sweep", "1000,5000,10000,30000,50000")
    assert found["trace"]["requests"] == 3993
    assert (found["asked"], found["trace"]["different_pages"]) == (121_877, 43_924)
    assert round(100 * found["hit_rate"], 1) == 64.0
    points = {each["dram_pages"]: each["hit_rate"] for each in found["sweep"][0]["points"]}
    rounded = [round(100 * points[size], 1) for size in (1000, 5000, 10_000, 30_000, 50_000)]
    assert rounded == [8.2, 27.9, 42.3, 62.4, 64.0]


@pytest.mark.skipif(not PUBLIC_TRACE.exists(), reason="the public trace is not beside the checkout")
def test_order_of_the_daemon_is_near_the_published_one_on_the_public_trace(replay: Any) -> None:
    for pages in (1000, 5000, 10_000, 30_000):
        size = ("--dram-pages", str(pages))
        alone = replay(str(PUBLIC_TRACE), *size)["hit_rate"]
        leaves = replay(str(PUBLIC_TRACE), *size, "--leaves-first")["hit_rate"]
        assert alone <= leaves < alone + 0.002


@pytest.mark.skipif(not PUBLIC_TRACE.exists(), reason="the public trace is not beside the checkout")
def test_optimum_of_the_public_trace_is_far_from_lru(replay: Any) -> None:
    found = replay(str(PUBLIC_TRACE), "--policy", "opt", "--sweep", "1000,5000,10000,30000")
    rates = [round(100 * each["hit_rate"], 1) for each in found["sweep"][0]["points"]]
    assert rates == [27.7, 52.6, 61.8, 64.0]
