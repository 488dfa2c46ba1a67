"""What stays in a real daemon's full DRAM, by policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse_bench.harness.serving import Serving

PAGE_BYTES = 16384
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=PAGE_BYTES
)
SHARED, PAGES = range(40), 8
ROUNDS, JUDGED = 40, 15
OTHERS = 70
"""Of a round. With those that are shared 880 pages, and 12 MiB have room for 768."""


def tokens(number: int) -> list[int]:
    return list(range(number * 1000, number * 1000 + PAGES * SPACE.page_tokens))


class Traffic:
    """Prompts that come once, and some that come each round; what of these was found."""

    def __init__(self, client: kvw.Client) -> None:
        self.space, self.client = client.open(SPACE), client
        self.rows = np.zeros((PAGES, PAGE_BYTES), np.uint8)
        self.once = 10_000

    def ask(self, number: int) -> int:
        found = self.space.load(tokens(number), self.rows, timeout_s=60)
        if found < PAGES:
            self.space.store(tokens(number), self.rows, timeout_s=60)
        return found

    def round(self) -> int:
        found = sum(self.ask(number) for number in SHARED)
        for _ in range(OTHERS):
            self.once += 1
            self.ask(self.once)
        return found


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_what_comes_back_stays_beside_what_does_not_only_where_uses_count(
    tmp_path: Path, policy: str
) -> None:
    with Serving(tmp_path, dram="12MiB", policy=policy) as serving, serving.connect() as client:
        traffic = Traffic(client)
        found = [traffic.round() for _ in range(ROUNDS)]
        share = sum(found[-JUDGED:]) / (JUDGED * len(SHARED) * PAGES)
        assert (share > 0.9) == (policy == "adaptive"), found
        assert (share < 0.1) == (policy == "lru"), found


def test_operators_are_told_which_policy_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for policy, said in (("lru", False), ("adaptive", True)):
        with Serving(tmp_path, dram="12MiB", policy=policy) as serving:
            assert main(["status", "--socket", serving.socket]) == Exit.OK
            assert policy in capsys.readouterr().out
            assert main(["advise", "--socket", serving.socket]) == Exit.OK
            assert ("evicts by adaptive" in capsys.readouterr().out) == said
