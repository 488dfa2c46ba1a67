"""The example of docs/transformers.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kvwarehouse as kvw

pytest.importorskip("torch", reason="needs torch: make test-engines installs it")
pytest.importorskip("transformers", reason="needs transformers: make test-engines installs it")
pytest.importorskip("lmdb", reason="needs the daemon's extra: make test-engines installs it")

DOCUMENT = Path(__file__).parents[3] / "docs" / "transformers.md"


def test_example_generates_an_answer(model: Any, prompt: Any) -> None:
    (example,) = re.findall(
        r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE
    )
    with kvw.embedded(dram="64MiB") as client:
        names = {"model": model, "address": client.address, "checkpoint": "tiny"}
        scope: dict[str, Any] = {**names, "input_ids": prompt}
        exec(example, scope)
    assert scope["answer"].shape[1] > prompt.shape[1]
    assert scope["result"].tokens_computed == prompt.shape[1]
