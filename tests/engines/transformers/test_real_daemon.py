"""The connector and the demo on the real daemon: shared memory, a kill, a disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvwarehouse as kvw

pytest.importorskip("torch", reason="needs torch: make test-engines installs it")
pytest.importorskip("transformers", reason="needs transformers: make test-engines installs it")
pytest.importorskip("lmdb", reason="needs the daemon's extra: make test-engines installs it")

from kvwarehouse_bench.harness.eventually import DEADLINE_S
from kvwarehouse_connectors.transformers import PrefillOptions, WarehousePrefill
from kvwarehouse_connectors.transformers.demo import command, run, subject
from kvwarehouse_connectors.transformers.demo.daemon import DemoDaemon

# Not the default of 2 s: a busy machine's disk and daemon have all the time that they need.
OPTIONS = PrefillOptions(page_tokens=16, chunk_tokens=32, load_timeout_s=DEADLINE_S)


def same(torch: Any, one: Any, other: Any) -> bool:
    tensors = [
        (a, b)
        for x, y in zip(one.cache.layers, other.cache.layers, strict=True)
        for a, b in ((x.keys, y.keys), (x.values, y.values))
    ]
    return all(torch.equal(a, b) for a, b in [*tensors, (one.logits, other.logits)])


def test_reuse_from_dram_equals_recompute_bit_for_bit(torch: Any, model: Any, prompt: Any) -> None:
    with (
        kvw.embedded(dram="64MiB") as client,
        WarehousePrefill(model, client, weights="tiny", options=OPTIONS) as prefiller,
    ):
        computed = prefiller.prefill(prompt)
        assert prefiller.flush()
        reused = prefiller.prefill(prompt)
    assert reused.tokens_loaded == 128
    assert reused.reuse.pages_by_tier == {"hbm": 0, "dram": 8, "nvme": 0, "remote": 0}
    assert same(torch, computed, reused)


def test_reuse_outlives_the_daemon_and_then_the_dram_tier(
    torch: Any, model: Any, prompt: Any, tmp_path: Path
) -> None:
    with DemoDaemon(1 << 20, str(tmp_path)) as daemon:
        with (
            daemon.start() as client,
            WarehousePrefill(model, client, weights="tiny", options=OPTIONS) as prefiller,
        ):
            computed = prefiller.prefill(prompt)
            assert prefiller.flush()
            assert client.flush().pending == 0
        daemon.kill()
        found = []
        for _ in ("dram", "nvme"):
            with (
                daemon.start() as client,
                WarehousePrefill(model, client, weights="tiny", options=OPTIONS) as prefiller,
            ):
                found.append(prefiller.prefill(prompt))
            daemon.stop()
            daemon.drop_dram()
    assert [result.reuse.pages_by_tier for result in found] == [
        {"hbm": 0, "dram": 8, "nvme": 0, "remote": 0},
        {"hbm": 0, "dram": 0, "nvme": 8, "remote": 0},
    ]
    assert all(result.tokens_loaded == 128 for result in found)
    assert all(same(torch, computed, result) for result in found)


def test_daemon_killed_under_a_connected_model_costs_nothing_but_time(
    torch: Any, model: Any, prompt: Any, tmp_path: Path
) -> None:
    longer = torch.cat([prompt, prompt], dim=1)
    with (
        DemoDaemon(1 << 20, str(tmp_path)) as daemon,
        daemon.start() as client,
        WarehousePrefill(model, client, weights="tiny", options=OPTIONS) as prefiller,
    ):
        expected = prefiller.prefill(longer, store=False)
        prefiller.prefill(prompt)
        assert prefiller.flush()
        daemon.kill()
        result = prefiller.prefill(longer)
        assert prefiller.flush() is False, "the longer prompt has nowhere to go"
    assert same(torch, expected, result)


def test_demo_passes_on_a_tiny_model_and_removes_what_it_made(
    model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def built(text: str) -> subject.Subject:
        return subject.Subject(model, "tiny", lambda t: [ord(c) % 512 for c in t], str, True, 4096)

    monkeypatch.setattr(run, "built", built)
    # By name: other tests of this machine make folders beside them, and take them away.
    made: list[Path] = []
    folder = DemoDaemon._folder
    monkeypatch.setattr(
        DemoDaemon, "_folder", lambda self, *how: made.append(folder(self, *how)) or made[-1]
    )
    assert command(["--json", "--max-tokens", "1024", "--dir", str(tmp_path)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["faults"] == []
    assert said["hit_rate"] > 0.8
    assert list(tmp_path.iterdir()) == []
    assert len(made) == 2
    assert not any(each.exists() for each in made)


def test_demo_refuses_a_disk_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(kvw.UsageError, match="no directory of the NVMe tier"):
        DemoDaemon(1 << 20, str(tmp_path / "absent"))
