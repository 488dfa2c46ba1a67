"""What docs/vllm.md says that only vLLM's environment can judge."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import kvwarehouse_connectors.vllm.handoff as handoff
import kvwarehouse_connectors.vllm.wishes as wishes
from kvwarehouse_connectors.doctor.vllm import LEAST, RUN
from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm.stats import COUNTERS

TEXT = (Path(__file__).parents[4] / "docs" / "vllm.md").read_text(encoding="utf-8")


def test_every_metric_is_in_the_text() -> None:
    assert [name for name in COUNTERS if f"`{name}`" not in TEXT] == []


def test_switches_and_the_record_of_the_examples_are_understood() -> None:
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)]
    (switches,) = [block for block in blocks if wishes.LOAD in block]
    assert not wishes.switch(switches, wishes.LOAD)
    assert not wishes.switch(switches, wishes.STORE)
    assert [block for block in blocks if block == {wishes.HANDOFF: True}]
    (record,) = [block for block in blocks if handoff.RECORD in block]
    found = handoff.decode(record)
    assert isinstance(found, handoff.Record)
    assert found.tokens == 4096


def test_versions_in_the_text_are_those_that_are_served_and_run() -> None:
    assert f"vLLM {LEAST[0]}.{LEAST[1]} or later" in TEXT
    assert f"vLLM {compat.VERSION.partition('+')[0]} for the CPU" in TEXT
    assert compat.VERSION.startswith(f"{RUN[0]}.{RUN[1]}.")
