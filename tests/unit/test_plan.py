"""`kvwarehouse plan`: its formulas with round numbers, and the command line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.errors import UsageError
from kvwarehouse.model.architecture import uniform
from kvwarehouse.model.catalogue import find_model
from kvwarehouse.model.footprint import Footprint, find_dtype
from kvwarehouse.planning.disaggregation import Situation, advice_of, checks_of, handoff_seconds
from kvwarehouse.planning.hardware import TierSpeed, find_gpu
from kvwarehouse.planning.interval import Quantity, quantity, within
from kvwarehouse.planning.latency import (
    Decode,
    DecodeStep,
    Prefill,
    break_even_tokens,
    estimated_decode,
    estimated_prefill,
    load_seconds,
    measured_prefill,
)
from kvwarehouse.planning.plan import Network, Plan, Prices, ServiceLoad

# 1,000 bytes a token at most: 5 layers of 50 elements, key and value, 2 bytes.
THOUSAND = Footprint(uniform(5, 1, 50), find_dtype("fp16"))
SEVENTY = Footprint(find_model("llama-3.3-70b"), find_dtype("fp16"))
PER_MS = Prefill(quantity(1e-3), quantity(0.0), "a test")


def tier(rate: float, latency_s: float = 0.0, write: float = 1e6) -> TierSpeed:
    return TierSpeed("test", quantity(rate), quantity(write), quantity(latency_s), "a test")


def plan_of(**changes: Any) -> Plan:
    plan = Plan(
        footprint=THOUSAND,
        workload=ServiceLoad(1000, 101, 0.5, 0.6),
        gpu=find_gpu("h100"),
        gpus=8,
        prefill=PER_MS,
        decode=Decode(quantity(0.04), "a test"),
        tiers=[tier(1e7)],
        network=Network(),
        prices=Prices(quantity(2.0), quantity(0.1), "a test"),
    )
    return replace(plan, **changes)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> Any:
        assert main(["plan", *arguments, "--json"]) == Exit.OK
        return json.loads(capsys.readouterr().out)

    return run


# --- formulas -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gbit", "milliseconds"), [(100, 107), (400, 27)])
def test_handoff_of_a_70b_prompt_has_the_published_times(gbit: float, milliseconds: int) -> None:
    kv_bytes = SEVENTY.context_bytes(4096)
    assert round(kv_bytes / 1e9, 2) == 1.34
    assert round(handoff_seconds(kv_bytes, gbit).value * 1000) == milliseconds


def test_first_token_is_the_load_and_then_the_rest() -> None:
    plan = plan_of(tiers=[tier(1e7, latency_s=0.01)])
    assert plan.recompute_seconds.value == pytest.approx(1.0)
    # 600 tokens of 1,000 bytes at 10 MB/s, then 400 tokens at 1 ms.
    assert plan.first_token(plan.tiers[0]).value == pytest.approx(0.01 + 0.06 + 0.4)


def test_break_even_is_latency_over_what_a_token_saves() -> None:
    # A token computes in 1 ms and loads in 0.1 ms: 9 ms of latency are 10 tokens.
    found = break_even_tokens(PER_MS, THOUSAND, tier(1e7, latency_s=0.009 - 1e-9))
    assert found == Quantity(10, 10, 10)


def test_break_even_never_comes_where_loading_a_token_takes_longer() -> None:
    assert break_even_tokens(PER_MS, THOUSAND, tier(0.9e6)) is None


def test_break_even_comes_later_by_the_square_of_attention() -> None:
    quadratic = Prefill(quantity(1e-3), quantity(1e-6), "a test")
    found = break_even_tokens(quadratic, THOUSAND, tier(0.5e6))
    # 1e-3 n + 1e-6 n^2 / 2 >= 2e-3 n from n = 2,000.
    assert found is not None
    assert found.value == pytest.approx(2000, abs=1)


def test_break_even_range_says_never_where_the_slow_end_never_wins() -> None:
    unsure = TierSpeed("t", Quantity(1e7, 0.5e6, 1e7), quantity(1e6), quantity(0.009), "a test")
    found = break_even_tokens(PER_MS, THOUSAND, unsure)
    assert found is not None
    assert found.value == 10
    assert found.high == math.inf


def test_windows_load_only_their_span() -> None:
    windowed = Footprint(find_model("gemma-3-27b"), find_dtype("fp16"))
    long = load_seconds(windowed, tier(1e9), 100_000).value
    assert long == pytest.approx(windowed.context_bytes(100_000) / 1e9)
    assert long < windowed.bytes_per_token * 100_000 / 1e9 / 4


def test_prefill_estimate_counts_parameters_and_pairs() -> None:
    model = find_model("llama-3.3-70b")
    found = estimated_prefill(model, find_gpu("h100"), 8)
    reached = 8 * 989e12 * 0.5
    assert found.token_s.value == pytest.approx(2 * 70.6e9 / reached)
    # Query by key and weights by value: 2 FLOPs each for 64 heads of 128 dimensions and 80 layers.
    assert found.pair_s.value == pytest.approx(80 * 2 * 64 * (128 + 128) / reached)
    assert found.token_s.low < found.token_s.value < found.token_s.high


def test_prefill_of_a_model_without_attention_counts_parameters_alone() -> None:
    # It was refused: the parameters were said to be unknown, and it has no query heads.
    found = estimated_prefill(find_model("mamba-2.8b"), find_gpu("h100"), 8)
    assert found.token_s.value == pytest.approx(2 * 2.8e9 / (8 * 989e12 * 0.5))
    assert found.pair_s.value == 0
    assert "heads" not in found.assumption


def test_prefill_of_a_model_with_unknown_query_heads_is_refused_until_they_are_given(
    shown: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "deepseek-v4-pro"]) == Exit.USAGE
    said = capsys.readouterr().err
    assert "how many query heads deepseek-v4-pro has is not known; give --heads" in said
    assert "[unknown_heads]" in said
    assert shown("--model", "deepseek-v4-pro", "--heads", "128")["engine"]


def test_prefill_of_a_given_shape_says_which_query_heads_it_takes(shown: Any) -> None:
    shape = ("--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--params", "70.6")
    taken = shown(*shape)["engine"]["prefill_tokens_per_s"]
    assert "8 query heads, as many as KV heads" in taken["assumption"]
    given = shown(*shape, "--heads", "64")["engine"]["prefill_tokens_per_s"]
    assert "heads" not in given["assumption"]
    known = shown("--model", "llama-3.3-70b")["engine"]["prefill_tokens_per_s"]
    assert given["value"] == pytest.approx(known["value"])


def test_active_parameters_are_used_where_all_of_them_are_known(shown: Any) -> None:
    # Without --params they were ignored without a word.
    taken = shown("--model", "llama-3.3-70b", "--active-params", "7")["engine"]
    assert "each of 7 B parameters" in taken["prefill_tokens_per_s"]["assumption"]


def test_prefill_after_a_load_takes_what_the_whole_takes_less_the_loaded_part() -> None:
    prefill = estimated_prefill(find_model("llama-3.1-8b"), find_gpu("a100"), 1)
    whole, part = prefill.seconds(9000).value, prefill.seconds(4000).value
    assert prefill.seconds(9000, 4000).value == pytest.approx(whole - part)


def test_decode_step_reads_weights_once_and_every_context() -> None:
    step = DecodeStep(SEVENTY, find_gpu("h100"), 8, batch=10, context_tokens=1000)
    bytes_read = 70.6e9 * 2 + 10 * 1000 * 327_680
    assert estimated_decode(step).token_s.value == pytest.approx(bytes_read / (8 * 3350e9 * 0.6))


def test_mixture_decode_reads_between_one_tokens_experts_and_all() -> None:
    footprint = Footprint(find_model("deepseek-v3"), find_dtype("fp16"))
    token_s = estimated_decode(DecodeStep(footprint, find_gpu("h200"), 8, 4, 1)).token_s
    assert token_s.low < token_s.value < token_s.high


def test_shares_of_a_request_are_one_together() -> None:
    plan = plan_of()
    assert plan.prefill_share.value == pytest.approx(1.0 / 5.0)
    assert plan.decode_share.value == pytest.approx(4.0 / 5.0)


def test_one_token_answers_are_all_prefill() -> None:
    assert plan_of(workload=ServiceLoad(10, 1, 1, 0)).prefill_share.value == pytest.approx(1)


def test_store_rate_is_compared_at_the_mean_and_at_full_prefill() -> None:
    # Mean: 0.5/s x 400 tokens x 1,000 B = 200 kB/s. Full prefill: 1,000 tokens/s = 1 MB/s.
    for write, mean, peak in ((2e6, "yes", "yes"), (5e5, "yes", "no"), (1e5, "no", "no")):
        rate = plan_of().store_rate(tier(1e7, write=write))
        assert (rate.keeps_up_on_average, rate.keeps_up_at_peak) == (mean, peak)
        assert rate.mean_bytes_per_s == pytest.approx(200_000)
        assert rate.peak_bytes_per_s.value == pytest.approx(1e6)


def test_store_rate_is_open_where_ranges_overlap() -> None:
    unsure = TierSpeed("t", quantity(1e7), Quantity(1.1e6, 0.5e6, 2e6), quantity(0.0), "a test")
    assert plan_of().store_rate(unsure).keeps_up_at_peak == "likely"


def test_savings_are_the_reused_tokens_of_a_day() -> None:
    found = {name: each.amount for name, each in plan_of().savings.items()}
    # 600 tokens of 1 ms, 0.5 a second, 86,400 seconds, 8 GPUs.
    hours = 0.6 * 0.5 * 86_400 * 8 / 3600
    assert found["gpu_hours_per_day"].value == pytest.approx(hours)
    assert found["energy_kwh_per_day"].value == pytest.approx(hours * 0.7 * 0.85 * 1.3)
    assert found["gpu_money_per_day"].value == pytest.approx(hours * 2)


def test_nothing_reused_saves_nothing() -> None:
    found = plan_of(workload=ServiceLoad(1000, 10, 1, 0)).savings
    assert all(each.amount == quantity(0.0) for each in found.values())


# --- the five checks ------------------------------------------------------------------------------

GOOD = Situation(quantity(0.9), 4e8, 0.5, 64, True, 400.0, True)


def test_all_five_for_it_separates() -> None:
    assert [check.verdict for check in checks_of(GOOD)] == ["for"] * 5
    assert advice_of(checks_of(GOOD)) == "separate prefill and decode"


@pytest.mark.parametrize(
    ("changes", "which", "verdict"),
    [
        ({"decode_share": quantity(0.69)}, 0, "against"),
        ({"decode_share": quantity(0.75)}, 0, "open"),
        ({"decode_share": quantity(0.86)}, 0, "for"),
        ({"handoff_bytes": 6e8}, 1, "for"),
        ({"handoff_bytes": 6e8, "network_gbit": 50.0}, 1, "against"),
        ({"handoff_bytes": 4e8, "network_gbit": 50.0}, 1, "for"),
        ({"hit_rate": 0.81}, 2, "against"),
        ({"hit_rate": 0.80}, 2, "for"),
        ({"gpus": 15}, 3, "against"),
        ({"gpus": 16}, 3, "open"),
        ({"gpus": 33, "steady": False}, 3, "open"),
        ({"gpus": 33}, 3, "for"),
        ({"network_gbit": 50.0}, 4, "for"),
        ({"network_gbit": 50.0, "rdma": False}, 4, "against"),
        ({"network_gbit": 100.0, "rdma": False}, 4, "for"),
    ],
)
def test_check_turns_at_its_threshold(changes: dict[str, Any], which: int, verdict: str) -> None:
    checks = checks_of(replace(GOOD, **changes))
    assert checks[which].verdict == verdict
    advice = advice_of(checks)
    expected = {"for": "separate", "against": "keep", "open": "measure"}[verdict]
    if all(check.verdict == "for" for at, check in enumerate(checks) if at != which):
        assert advice.startswith(expected)


# --- ranges ---------------------------------------------------------------------------------------

POSITIVE = st.floats(0.01, 1e6)


@st.composite
def quantities(draw: st.DrawFn) -> Quantity:
    low, value, high = sorted(draw(st.lists(POSITIVE, min_size=3, max_size=3)))
    return Quantity(value, low, high)


@given(quantities(), quantities(), st.floats(0, 1), st.floats(0, 1))
def test_range_of_a_result_holds_every_result(
    a: Quantity, b: Quantity, at_a: float, at_b: float
) -> None:
    x = a.low + (a.high - a.low) * at_a
    y = b.low + (b.high - b.low) * at_b
    pairs = [(a + b, x + y), (a - b, x - y), (a * b, x * y), (a / b, x / y)]
    for result, sample in pairs:
        slack = 1e-6 * max(1.0, abs(result.low), abs(result.high))
        assert result.low - slack <= sample <= result.high + slack


def test_measured_rate_has_a_spread() -> None:
    assert measured_prefill(1000).tokens_per_s(500).low < 1000
    assert within(10, 0.2, 0.5) == Quantity(10, 8, 15)


# --- the command line -----------------------------------------------------------------------------


def test_plan_prints_every_answer_with_assumption_and_range(shown: Any) -> None:
    found = shown("--model", "llama-3.3-70b", "--prompt-tokens", "4096")
    assert found["handoff"]["bytes"] == 4096 * 327_680
    assert round(found["handoff"]["seconds"]["100"], 3) == 0.107
    assert [each["tier"] for each in found["tiers"]] == ["dram", "nvme", "remote"]
    assert len(found["separate"]["checks"]) == 5
    estimates = [
        *found["engine"].values(),
        *found["savings"].values(),
        *(each["first_token_seconds"] for each in found["tiers"]),
    ]
    for each in estimates:
        assert each["low"] <= each["value"] <= each["high"]
        assert each["assumption"]


def test_measured_rates_replace_estimates(shown: Any) -> None:
    found = shown(
        *("--layers", "80", "--kv-heads", "8", "--head-dim", "128"),
        *("--prefill-tokens-per-s", "20000", "--decode-ms", "20", "--nvme-read", "10GB"),
    )
    assert found["engine"]["prefill_tokens_per_s"]["value"] == pytest.approx(20_000)
    assert found["engine"]["decode_seconds_per_token"]["value"] == pytest.approx(0.02)
    nvme = found["tiers"][1]["first_token_seconds"]
    assert "given" in nvme["assumption"]
    assert nvme["value"] == pytest.approx(500e-6 + 4096 * 327_680 / 10e9 + 4096 / 20_000)


def test_never_is_null_in_json(shown: Any) -> None:
    found = shown(
        *("--model", "gpt-2", "--prefill-tokens-per-s", "1e12", "--decode-ms", "1"),
        *("--nvme-read", "1MB"),
    )
    assert found["tiers"][1]["break_even_tokens"] is None


def test_overload_is_said(shown: Any) -> None:
    found = shown("--model", "llama-3.3-70b", "--requests-per-s", "100")
    assert any("queue without end" in note for note in found["notes"])


def test_plan_page_and_table_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", "--model", "qwen2.5-7b", "--html", str(page)]) == Exit.OK
    assert "Break-even" in capsys.readouterr().out
    assert "<polyline" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "llama-3.3-70b", "--gpu", "z80"), "z80"),
        (("--model", "llama-3.3-70b", "--gpus", "0"), "0 GPUs"),
        (("--model", "llama-3.3-70b", "--reuse", "60"), "0.6 for 60 %"),
        (("--model", "llama-3.3-70b", "--reuse", "nan"), "nan"),
        (("--model", "llama-3.3-70b", "--prompt-tokens", "0"), "0 tokens"),
        (("--model", "llama-3.3-70b", "--requests-per-s", "-1"), "-1 requests"),
        (("--model", "llama-3.3-70b", "--prefill-tokens-per-s", "0"), "prefill rate of 0"),
        (("--model", "llama-3.3-70b", "--network", "0"), "0 Gb/s"),
        (("--model", "llama-3.3-70b", "--nvme-read", "0GB"), "nvme"),
        (("--model", "llama-3.3-70b", "--params", "x"), "--params 'x'"),
        (("--model", "llama-3.3-70b", "--active-params", "x"), "--active-params 'x'"),
        (("--model", "llama-3.3-70b", "--active-params", "71"), "more than all 70.6 billion"),
        (
            ("--layers", "2", "--kv-heads", "8", "--head-dim", "128", "--active-params", "3"),
            "--active-params needs --params",
        ),
        (("--model", "llama-3.3-70b", "--heads", "0"), "--heads 0"),
        (("--model", "llama-3.3-70b", "--heads", "12"), "12 attention heads over 8 KV heads"),
        (("--model", "llama-3.3-70b", "--kwh-price", "-2"), "--kwh-price -2"),
        (("--layers", "2", "--kv-heads", "8", "--head-dim", "128"), "--params"),
    ],
)
def test_plan_refuses_and_names_the_value(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == Exit.USAGE
    assert said in capsys.readouterr().err


def test_tier_without_a_rate_is_refused() -> None:
    with pytest.raises(UsageError, match="positive one"):
        tier(0.0)
