"""What a daemon has loaded when it serves: nothing that only some calls need, which would be a
fifth of its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwarehouse_bench.harness.serving import Serving
from testkit.known_prompt import KnownPrompt

PROMPT = KnownPrompt("m", pages=3, page_bytes=20_000)


def test_daemon_loads_numpy_for_the_first_call_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with Serving(tmp_path) as serving, serving.connect() as client:
        maps = Path(f"/proc/{serving.pid}/maps")
        PROMPT.store_whole(client)
        assert PROMPT.load(client) == PROMPT.pages
        client.status()
        assert "numpy" not in maps.read_text(encoding="utf-8")
        with serving.connect_remote() as remote:
            assert PROMPT.load(remote) == PROMPT.pages
        assert "numpy" in maps.read_text(encoding="utf-8")
