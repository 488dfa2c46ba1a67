"""Adapters are told apart by their weights, and served only where it is sure which they have."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from safetensors.numpy import save_file

from kvwarehouse_connectors.vllm.adapters import Adapters
from vllm_parts.requests import adapter

NAME = "adapter_model.safetensors"


def write(folder: Path, value: float, *, at_ns: int = 0) -> Path:
    """An adapter whose weights are `value`, of the same size whatever it is."""
    folder.mkdir(exist_ok=True)
    save_file({"a": np.full((8, 8), value, np.float32)}, folder / NAME)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    if at_ns:
        os.utime(folder / NAME, ns=(at_ns, at_ns))
    return folder


def test_request_without_an_adapter_has_no_fingerprint() -> None:
    assert Adapters().fingerprint(None) == b""


def test_adapters_of_equal_weights_are_equal_under_any_name_and_path(tmp_path: Path) -> None:
    one = write(tmp_path / "one", 1.0)
    shutil.copytree(one, tmp_path / "same")
    adapters = Adapters()
    first = adapters.fingerprint(adapter(str(one)))
    assert first is not None
    assert len(first) == 32
    assert adapters.fingerprint(adapter(str(tmp_path / "same"), name="b", number=2)) == first
    other = write(tmp_path / "other", 2.0)
    assert adapters.fingerprint(adapter(str(other), name="c", number=3)) not in (None, first)


def test_adapter_is_not_served_after_its_files_changed_beneath_the_engine(tmp_path: Path) -> None:
    """The engine may hold the old weights or the new: nobody here can know."""
    folder = write(tmp_path / "one", 1.0, at_ns=10**18)
    adapters = Adapters()
    lora = adapter(str(folder))
    assert adapters.fingerprint(lora)
    write(folder, 2.0, at_ns=2 * 10**18)
    assert adapters.fingerprint(lora) is None
    write(folder, 1.0, at_ns=10**18)
    assert adapters.fingerprint(lora) is None


def test_adapter_is_not_served_after_its_files_went(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", 1.0)
    adapters = Adapters()
    lora = adapter(str(folder))
    assert adapters.fingerprint(lora)
    shutil.rmtree(folder)
    assert adapters.fingerprint(lora) is None


@pytest.mark.parametrize("how", ["in place", "under another number"])
def test_adapter_that_the_engine_loads_anew_is_not_shared_before_a_reset(
    how: str, tmp_path: Path
) -> None:
    """vLLM's own cache keeps blocks of the old weights under the same name and path: a local hit on
    them would be stored under the new weights' key."""
    folder = write(tmp_path / "one", 1.0, at_ns=10**18)
    adapters = Adapters()
    old = adapters.fingerprint(adapter(str(folder)))
    write(folder, 2.0, at_ns=2 * 10**18)
    again = (
        adapter(str(folder), inplace=True) if how == "in place" else adapter(str(folder), number=2)
    )
    assert adapters.fingerprint(again) is None
    assert adapters.fingerprint(again) is None
    adapters.forget()
    assert adapters.fingerprint(again) not in (None, old)


@pytest.mark.parametrize("content", [None, "empty"])
def test_adapter_without_weights_that_can_be_read_is_not_served(
    content: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "absent"
    if content is not None:
        folder.mkdir()
    assert Adapters().fingerprint(adapter(str(folder))) is None
    assert "not shared" in caplog.text


def test_adapter_that_is_being_written_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvwarehouse as kvw

    folder = write(tmp_path / "one", 1.0, at_ns=10**18)
    read = kvw.fingerprint

    def read_while_written(path: str) -> str:
        digest = read(path)
        write(folder, 2.0, at_ns=2 * 10**18)
        return digest

    monkeypatch.setattr(kvw, "fingerprint", read_while_written)
    assert Adapters().fingerprint(adapter(str(folder))) is None
