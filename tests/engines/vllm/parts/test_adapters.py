"""Adapters are told apart by their weights, and served only where it is sure which they have."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.vllm import adapters as module
from kvwarehouse_connectors.vllm.adapters import AdapterLook, Adapters
from vllm_parts.halves import Engine
from vllm_parts.prompts import one_group
from vllm_parts.requests import adapter, request, tokens, write_adapter


@pytest.fixture
def start() -> Iterator[Callable[[], Adapters]]:
    """start(): those of a further engine."""
    made: list[Adapters] = []

    def started() -> Adapters:
        made.append(Adapters())
        return made[-1]

    yield started
    for one in made:
        one.close()


@pytest.fixture
def adapters(start: Callable[[], Adapters]) -> Adapters:
    return start()


def answered(adapters: Adapters, lora: Any) -> AdapterLook:
    """As the scheduler does with a request that has come."""
    look = adapters.look(lora)
    assert look is not None
    eventually(lambda: not adapters.pending(look), "the adapter was looked at")
    return look


def known(adapters: Adapters, lora: Any) -> bytes | None:
    return adapters.fingerprint(answered(adapters, lora))


def test_request_without_an_adapter_has_no_fingerprint(adapters: Adapters) -> None:
    assert adapters.look(None) is None
    assert adapters.fingerprint(None) == b""


def test_adapters_of_equal_weights_are_equal_under_any_name_and_path(
    adapters: Adapters, tmp_path: Path
) -> None:
    one = write_adapter(tmp_path / "one", 1.0)
    shutil.copytree(one, tmp_path / "same")
    first = known(adapters, adapter(str(one)))
    assert first is not None
    assert len(first) == 32
    assert known(adapters, adapter(str(tmp_path / "same"), name="b", number=2)) == first
    other = write_adapter(tmp_path / "other", 2.0)
    assert known(adapters, adapter(str(other), name="c", number=3)) not in (None, first)


def test_adapter_is_not_served_after_its_files_changed_beneath_the_engine(
    adapters: Adapters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine may hold the old weights or the new: nobody here can know. A reset of its cache
    makes it load nothing."""
    folder = write_adapter(tmp_path / "one", 1.0)
    kept = shutil.copytree(folder, tmp_path / "kept")
    lora = adapter(str(folder))
    assert known(adapters, lora)
    write_adapter(folder, 2.0)
    assert known(adapters, lora) is None
    assert "its files have changed" in caplog.text
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)
    assert known(adapters, lora) is None
    adapters.forget()
    assert known(adapters, lora) is None


def test_adapter_is_not_served_after_its_files_went(adapters: Adapters, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", 1.0)
    lora = adapter(str(folder))
    assert known(adapters, lora)
    shutil.rmtree(folder)
    assert known(adapters, lora) is None


def test_adapter_that_the_engine_loads_anew_is_not_shared_before_a_reset(
    start: Callable[[], Adapters], tmp_path: Path
) -> None:
    """vLLM's own cache keeps blocks of the old weights under the same name and path: a local hit on
    them would be stored under the new weights' key."""
    adapters = start()
    folder = write_adapter(tmp_path / "one", 1.0)
    old = known(adapters, adapter(str(folder)))
    write_adapter(folder, 2.0)
    again = adapter(str(folder), number=2)
    assert known(adapters, again) is None
    assert known(adapters, again) is None
    adapters.forget()
    assert known(adapters, again) not in (None, old)
    look = answered(adapters, again)
    adapters.forget()
    assert adapters.fingerprint(look) == known(start(), again), "a reset with nothing to forget"


def test_adapter_that_is_loaded_anew_with_each_step_is_never_shared(
    adapters: Adapters, tmp_path: Path
) -> None:
    """vLLM reads the files of a load_inplace adapter whenever it applies it."""
    folder = str(write_adapter(tmp_path / "one", 1.0))
    assert known(adapters, adapter(folder))
    assert known(adapters, adapter(folder, inplace=True)) is None
    assert known(adapters, adapter(folder)) is None, "its weights are those of the last load"
    assert known(adapters, adapter(folder, number=2)) is None, "vLLM's cache has blocks of it"
    adapters.forget()
    assert known(adapters, adapter(folder, inplace=True)) is None
    adapters.forget()
    assert known(adapters, adapter(folder, number=2))


@pytest.mark.parametrize("content", [None, "empty", "no config"])
def test_adapter_without_weights_that_can_be_read_is_not_served(
    content: str | None, adapters: Adapters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "absent"
    if content == "empty":
        folder.mkdir()
    elif content is not None:
        (write_adapter(folder, 1.0) / "adapter_config.json").unlink()
    assert known(adapters, adapter(str(folder))) is None
    assert "not shared" in caplog.text


def test_adapter_that_is_being_written_is_not_served(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "one", 1.0)
    read = kvw.fingerprint

    def read_while_written(path: Path, **options: Any) -> str:
        digest = read(path, **options)
        write_adapter(folder, 2.0)
        return digest

    monkeypatch.setattr(kvw, "fingerprint", read_while_written)
    assert known(adapters, adapter(str(folder))) is None


def test_only_the_files_that_vllm_reads_count(
    start: Callable[[], Adapters], tmp_path: Path
) -> None:
    """A trainer keeps its checkpoints and optimizers beside them."""
    folder = write_adapter(tmp_path / "one", 1.0)
    lora, adapters = adapter(str(folder)), start()
    first = known(adapters, lora)
    assert first is not None
    write_adapter(folder / "checkpoint-1", 2.0)
    (folder / "optimizer.pt").write_bytes(b"moments")
    write_adapter(folder, 2.0, name="adapter_model.safetensors.old")
    assert known(start(), lora) == first
    write_adapter(folder, 2.0, name="adapter_model.bin")
    assert known(start(), lora) == first, "vLLM reads the safetensors"
    (folder / "adapter_config.json").write_text('{"r": 16}')
    assert known(start(), lora) not in (None, first)


# -- where the files are ---------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The local snapshots of a hub's names."""
    import huggingface_hub

    snapshots: dict[str, Path] = {}

    def snapshot(name: str, *, local_files_only: bool) -> str:
        assert local_files_only
        return str(snapshots[name])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return snapshots


def test_name_of_the_hub_is_known_by_the_snapshot_that_the_engine_loaded(
    start: Callable[[], Adapters], hub: dict[str, Path], tmp_path: Path
) -> None:
    """Its name was its fingerprint: after a push a restarted engine was served the old weights' KV.
    Until the engine has used it, a newer snapshot may be downloaded."""
    lora = adapter("org/sql-lora")
    used = SimpleNamespace(lora_request=lora, num_output_tokens=1)
    first, second = start(), start()
    assert known(first, lora) is None
    hub["org/sql-lora"] = write_adapter(tmp_path / "one", 1.0)
    assert known(first, lora) is None
    first.used(used)
    old = known(first, lora)
    assert old is not None
    assert old == known(start(), adapter(str(tmp_path / "one")))
    hub["org/sql-lora"] = write_adapter(tmp_path / "two", 2.0)
    assert known(first, lora) is None
    assert known(second, lora) is None
    second.used(used)
    assert known(second, lora) not in (None, old)


def test_name_that_is_no_path_is_not_served(adapters: Adapters, hub: dict[str, Path]) -> None:
    """Such as those that trainers give adapters that they load from memory."""
    lora = adapter("simon_lora_path")
    adapters.used(SimpleNamespace(lora_request=lora, num_output_tokens=1))
    assert known(adapters, lora) is None
    assert known(adapters, lora) is None


@pytest.mark.parametrize("given", ["~/lora", "lora"])
def test_path_is_resolved_as_vllm_does(
    given: str, start: Callable[[], Adapters], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.lora.utils import get_adapter_absolute_path

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path / "lora", 1.0)
    adapters, lora = start(), adapter(given)
    first = known(adapters, lora)
    assert first is not None
    assert first == known(start(), adapter(get_adapter_absolute_path(given)))
    write_adapter(tmp_path / "lora", 2.0)
    assert known(adapters, lora) is None


# -- whoever waits ---------------------------------------------------------------------------------


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A file system that answers once the event is set."""
    answers, find = threading.Event(), module.find_files

    def late(path: str) -> Any:
        answers.wait()
        return find(path)

    monkeypatch.setattr(module, "find_files", late)
    yield answers
    answers.set()


def test_nobody_waits_for_a_file_system_that_hangs(
    adapters: Adapters,
    hanging: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora = adapter(str(write_adapter(tmp_path / "one", 1.0)))
    look = adapters.look(lora)
    assert look is not None
    assert adapters.pending(look)
    assert adapters.fingerprint(look) is None
    with monkeypatch.context() as later:
        later.setattr(module, "_PATIENCE_S", 0.0)
        assert not adapters.pending(look), "the request is computed"
    hanging.set()
    assert known(adapters, lora)


def test_request_that_waited_for_its_turn_has_its_adapter_looked_at_again(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "one", 1.0)
    look = answered(adapters, adapter(str(folder)))
    assert adapters.fingerprint(look)
    write_adapter(folder, 2.0)
    monkeypatch.setattr(module, "_FRESH_S", 0.0)
    assert adapters.pending(look)
    eventually(lambda: not adapters.pending(look), "it was looked at again")
    assert adapters.fingerprint(look) is None


def test_adapter_that_was_not_looked_at_for_a_while_is_not_known_to_be_the_same(
    adapters: Adapters, hanging: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging.set()
    look = answered(adapters, adapter(str(write_adapter(tmp_path / "one", 1.0))))
    assert adapters.still_known(look)
    hanging.clear()
    monkeypatch.setattr(module, "_FRESH_S", 0.0)
    assert not adapters.still_known(look)


def test_adapter_is_looked_at_while_a_step_takes_long(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: a step of seconds was the last of which anything was stored."""
    look = answered(adapters, adapter(str(write_adapter(tmp_path / "one", 1.0))))
    looks: list[str] = []
    see = module._see
    monkeypatch.setattr(module, "_see", lambda path, *how: looks.append(path) or see(path, *how))
    adapters.keep_fresh([look])
    eventually(lambda: len(looks) > 2, "it is looked at without being asked")
    monkeypatch.setattr(module, "_WANTED_S", 0.0)
    eventually(lambda: not adapters._wanted, "for as long as requests compute with it")


def test_known_adapter_is_looked_at_while_files_of_another_are_read(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = adapter(str(write_adapter(tmp_path / "one", 1.0)))
    answered(adapters, one)
    reads, goes_on = threading.Event(), threading.Event()

    def read(files: Any) -> bytes:
        reads.set()
        goes_on.wait()
        return bytes(32)

    monkeypatch.setattr(module, "files_digest", read)
    try:
        cold = adapter(str(write_adapter(tmp_path / "two", 2.0)), name="b", number=2)
        look = adapters.look(cold)
        assert look is not None
        assert reads.wait(60)
        assert known(adapters, one)
        assert adapters.pending(look)
    finally:
        goes_on.set()


def test_engine_that_has_had_too_many_adapters_says_so(
    adapters: Adapters,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_MOST_KNOWN", 1)
    folder = str(write_adapter(tmp_path / "one", 1.0))
    assert known(adapters, adapter(folder))
    assert known(adapters, adapter(folder, name="b", number=2)) is None
    assert known(adapters, adapter(folder, name="c", number=3)) is None
    assert caplog.text.count("has had 1 adapters") == 1


# -- requests --------------------------------------------------------------------------------------


def test_request_waits_until_its_adapter_is_known_and_is_served(
    shared: Serving, hanging: threading.Event, tmp_path: Path, rng: random.Random
) -> None:
    lora, ids = adapter(str(write_adapter(tmp_path / "one", 1.0))), tokens(rng, 160)
    with Engine(shared.address, one_group) as engine, Engine(shared.address, one_group) as other:
        one = request(ids, lora_request=lora)
        engine.scheduler.on_new_request(one)
        assert engine.scheduler.matched(one, 0) == (None, False)
        hanging.set()
        engine.begin(one)
        engine.fill(range(1, 11))
        engine.compute(one, [list(range(1, 11))], 160)
        again = request([*ids, 7], name="again", lora_request=lora)
        engine.stored(again, 160)
        assert other.promised(again) == 160
        assert other.promised(request([*ids, 7], name="plain")) == 0


def test_request_that_does_not_wait_for_its_adapter_is_computed(
    engine: Engine, hanging: threading.Event, tmp_path: Path, rng: random.Random
) -> None:
    """vLLM does not let a request wait that may not read the prefix cache."""
    lora = adapter(str(write_adapter(tmp_path / "one", 1.0)))
    one = request(tokens(rng, 160), lora_request=lora)
    engine.scheduler.on_new_request(one)
    engine.compute(one, [list(range(1, 11))], 160)
    assert engine.scheduler.matched(one, 0) == (0, False)
    assert engine.workers[0]._store_queue._ring.used_bytes == 0


def test_running_request_stores_nothing_once_its_adapters_files_have_changed(
    shared: Serving, tmp_path: Path, rng: random.Random
) -> None:
    """vLLM loads them anew when others had needed the adapter's place, and tells nobody."""
    folder = write_adapter(tmp_path / "one", 1.0)
    kept = shutil.copytree(folder, tmp_path / "kept")
    lora, ids, blocks = adapter(str(folder)), tokens(rng, 160), [list(range(1, 11))]
    with Engine(shared.address, one_group) as engine, Engine(shared.address, one_group) as other:
        one = request(ids, lora_request=lora)
        engine.begin(one)
        engine.fill(blocks[0])
        engine.compute(one, blocks, 80)
        write_adapter(folder, 2.0)
        look = engine.scheduler._requests["r"].look
        assert look is not None
        eventually(lambda: not engine.scheduler._adapters.still_known(look), "the change is seen")
        engine.compute(one, blocks, 80)
        # Stores keep their order: what comes after is there, so what was before would be.
        after = tokens(rng, 32)
        engine.begin(request(after, name="after"))
        engine.compute(engine.scheduler._requests["after"].request, blocks, 32)
        engine.stored(request([*after, 7], name="look"), 32)
        shutil.rmtree(folder)
        os.rename(kept, folder)
        assert other.promised(request([*ids, 7], name="again", lora_request=lora)) == 80


def test_reset_in_which_vllms_cache_was_not_reset_forgets_no_adapter(
    engine: Engine, tmp_path: Path, rng: random.Random
) -> None:
    """vLLM resets its connector also where blocks in use keep it from resetting its own cache,
    which then has blocks of the old weights under the same hashes."""
    pool = SimpleNamespace(cached_block_hash_to_block=object())
    engine.scheduler.set_cache_manager(SimpleNamespace(block_pool=pool))

    def stores(number: int) -> bool:
        one = request(tokens(rng, 32), lora_request=adapter(str(tmp_path / "one"), number=number))
        engine.begin(one)
        found = engine.scheduler._requests["r"].stores
        engine.scheduler.finished(one)
        return found

    write_adapter(tmp_path / "one", 1.0)
    assert stores(1)
    write_adapter(tmp_path / "one", 2.0)
    assert not stores(2)
    engine.scheduler.reset()
    assert not stores(2)
    pool.cached_block_hash_to_block = object()
    engine.scheduler.reset()
    assert stores(2)
