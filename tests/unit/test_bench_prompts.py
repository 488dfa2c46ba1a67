"""Lengths and rounds that a bench with an engine is asked for."""

from __future__ import annotations

import argparse

import pytest

from kvwarehouse.errors import UsageError
from kvwarehouse_bench.vllm.checkpoint import BLOCK_TOKENS
from kvwarehouse_bench.vllm.frame import Prompts, bench_parser

PROMPTS = Prompts("64,256,1024", "64,512", rounds=7, quick_rounds=3)


def args_of(*words: str) -> argparse.Namespace:
    parser = bench_parser("some", "about", "examples")
    PROMPTS.add_to(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "lengths", "rounds"),
    [
        ((), [64, 256, 1024], 7),
        (("--quick",), [64, 512], 3),
        (("--quick", "--lengths", "4096,128"), [128, 4096], 3),
        (("--quick", "--rounds", "9"), [64, 512], 9),
    ],
)
def test_lengths_and_rounds_are_those_asked_for_else_the_usual(
    words: tuple[str, ...], lengths: list[int], rounds: int
) -> None:
    assert PROMPTS.chosen(args_of(*words)) == (lengths, rounds)


@pytest.mark.parametrize(
    "words",
    [
        ("--lengths", str(BLOCK_TOKENS)),
        ("--lengths", "131073"),
        ("--lengths", "64,much"),
        ("--rounds", "0"),
        ("--rounds", "1001"),
    ],
)
def test_lengths_and_rounds_out_of_range_are_refused_by_name(words: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match=f"{words[0]} {words[1]}: "):
        PROMPTS.chosen(args_of(*words))
