"""Rooms on a GPU, straight to and from the arena, over a real daemon and the contract model of
CUDA's driver. Not a GPU: tests/gpu has the same on torch's tensors."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: make test-engines installs it")
pytest.importorskip("transformers", reason="needs transformers: make test-engines installs it")

import kvwarehouse as kvw
from kvwarehouse.client.gpu import kernels
from kvwarehouse.gpu import LoadPath, auto_path
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.core import PageGeometry, Plane
from kvwarehouse_connectors.core.device_copies import DeviceCopies
from kvwarehouse_connectors.transformers import PrefillOptions, WarehousePrefill
from kvwarehouse_connectors.transformers.transfer import DeviceTransfer, Stored
from testkit.cuda_model import ModelDevice
from testkit.cuda_tensors import ModelMemory, ModelStream, ModelTensor, contiguous
from testkit.gpu_paths import Choosing, kvikio_of

pytestmark = pytest.mark.usefixtures("contract_kept")

PAGE_TOKENS = 16
PAGES = 5
ROOM_TOKENS = 100
TIMEOUT_S = 60.0
# Keys and values of different sizes, two layers: (heads, size).
PLANES = ((2, 16), (3, 8), (1, 24), (2, 16))
ITEM_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "float32": 4}


class Rooms:
    """As RoomyCache.rooms, on the model's device."""

    def __init__(self, device: ModelDevice, rng: random.Random, dtype: str) -> None:
        item = ITEM_BYTES[dtype]
        shapes = [(1, heads, ROOM_TOKENS, size) for heads, size in PLANES]
        self.memories = [ModelMemory(device, int(np.prod(shape)) * item) for shape in shapes]
        self.tensors = [
            ModelTensor(memory, shape, contiguous(shape), item, dtype)
            for memory, shape in zip(self.memories, shapes, strict=True)
        ]
        self.rng = rng

    def noise(self) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        return [
            np.frombuffer(self.rng.randbytes(memory.size_bytes), np.uint8)
            for memory in self.memories
        ]

    def fill(self, datas: list[Any]) -> None:
        for memory, data in zip(self.memories, datas, strict=True):
            memory.fill(data)

    def pages(self, datas: list[Any] | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The layout in words: plane by plane [heads, page_tokens, size]; of what they hold now."""
        parts = []
        for number, (heads, _) in enumerate(PLANES):
            data = self.memories[number].data if datas is None else datas[number]
            whole = data.reshape(heads, ROOM_TOKENS, -1)[:, : PAGES * PAGE_TOKENS]
            cut = whole.reshape(heads, PAGES, PAGE_TOKENS, -1).transpose(1, 0, 2, 3)
            parts.append(cut.reshape(PAGES, -1))
        return np.concatenate(parts, axis=1)


class Staged:
    """Stands in for StagedTransfer, whose operations the model's tensors do not have."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def load(self, space: Any, tokens: Any, rooms: Any, timeout_s: float) -> int:
        self.calls.append("load")
        return 0

    def computed(self, rooms: Any) -> Any:
        self.calls.append("computed")

    def store(self, *_: Any) -> Stored:
        self.calls.append("store")
        return Stored()

    def close(self) -> None:
        self.calls.append("close")


class Rig:
    def __init__(
        self, device: ModelDevice, rng: random.Random, dtype: str, path: Any = None
    ) -> None:
        self.device = device
        self.rooms = Rooms(device, rng, dtype)
        self.geometry = PageGeometry(
            tuple(Plane(heads, size * ITEM_BYTES[dtype]) for heads, size in PLANES), PAGE_TOKENS
        )
        self.fallbacks: list[None] = []
        self.copies = DeviceCopies(0, lambda: self.fallbacks.append(None), path)
        self.staged = Staged()
        self.way = DeviceTransfer(self.geometry, self.staged, self.copies, ModelStream(device))
        self.tokens = np.array([rng.randrange(1 << 30) for _ in range(PAGES * PAGE_TOKENS)])
        self.space = kvw.Namespace(
            model="rooms",
            weights="w",
            dtype=dtype,
            layout="transformers/1",
            page_tokens=PAGE_TOKENS,
            page_bytes=self.geometry.page_bytes,
        )


@pytest.fixture(scope="module")
def client(cuda_driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvw.Client]:
    with (
        Serving(tmp_path_factory.mktemp("disk"), dram="64MiB") as serving,
        serving.connect(timeout_s=TIMEOUT_S) as client,
    ):
        yield client


def test_pages_on_nvme_come_by_the_path_that_was_chosen(
    device: ModelDevice, rng: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_path, "LEAST_BYTES", 4096)
    kvikio = kvikio_of(device)
    path = auto_path.AutoPath(0, select=Choosing(LoadPath.GDS), library=kvikio)
    rig = Rig(device, rng, "bfloat16", path)
    rooms, tokens = rig.rooms.tensors, rig.tokens
    with (
        Serving(tmp_path, dram="64MiB", nvme_capacity="64MiB") as serving,
        serving.connect(timeout_s=TIMEOUT_S) as client,
    ):
        ns = client.open(rig.space)
        rig.rooms.fill(rig.rooms.noise())
        before = rig.rooms.pages()
        assert rig.way.store(ns, tokens, rooms, 0, TIMEOUT_S, rig.way.computed(rooms)).stored
        assert client.flush().pending == 0
        client.evict(None, 100_000, "dram")
        eventually(
            lambda: rig.way.load(ns, tokens[::-1], rooms, 0) == 0 and path._reader, "the path"
        )
        rig.rooms.fill([np.full_like(memory.data, 7) for memory in rig.rooms.memories])
        assert rig.way.load(ns, tokens, rooms, TIMEOUT_S) == PAGES
        assert np.array_equal(rig.rooms.pages(), before)
        assert kvikio.reads > 0
        assert ns.lookup(tokens).by_tier == {"hbm": 0, "dram": 0, "nvme": PAGES, "remote": 0}
        path.close()
    assert rig.staged.calls == []
    assert not rig.fallbacks


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("first", [0, 2])
def test_pages_are_those_of_the_layout_and_come_back_past_host_memory(
    device: ModelDevice, client: kvw.Client, rng: random.Random, dtype: str, first: int
) -> None:
    rig = Rig(device, rng, dtype)
    ns = client.open(rig.space)
    rig.rooms.fill(rig.rooms.noise())
    before = rig.rooms.pages()
    rooms, tokens = rig.rooms.tensors, rig.tokens
    if first:
        rig.way.store(ns, tokens[: first * PAGE_TOKENS], rooms, 0, TIMEOUT_S)
    after = rig.way.computed(rooms)
    assert rig.way.store(ns, tokens, rooms, first, TIMEOUT_S, after) == Stored(PAGES - first)
    on_host = np.zeros_like(before)
    assert ns.load(tokens, on_host) == PAGES
    assert np.array_equal(on_host, before)
    rig.rooms.fill([np.full_like(memory.data, 7) for memory in rig.rooms.memories])
    assert rig.way.load(ns, tokens, rooms, TIMEOUT_S) == PAGES
    assert np.array_equal(rig.rooms.pages(), before)
    for memory, (heads, _) in zip(rig.rooms.memories, PLANES, strict=True):
        behind = memory.data.reshape(heads, ROOM_TOKENS, -1)[:, PAGES * PAGE_TOKENS :]
        assert (behind == 7).all(), "nothing else is written"
    assert rig.staged.calls == []


def test_store_in_another_thread_has_what_was_queued_before_it_and_waits_for_that(
    device: ModelDevice, client: kvw.Client, rng: random.Random
) -> None:
    rig = Rig(device, rng, "bfloat16")
    ns = client.open(rig.space)
    computed = rig.rooms.noise()
    device.set("hold", 1)
    for memory, data in zip(rig.rooms.memories, computed, strict=True):
        memory.queue_fill(data)
    after = rig.way.computed(rig.rooms.tensors)
    stored: list[Stored] = []
    thread = threading.Thread(
        target=lambda: stored.append(
            rig.way.store(ns, rig.tokens, rig.rooms.tensors, 0, TIMEOUT_S, after)
        )
    )
    thread.start()
    device.set("hold", 0)
    thread.join(TIMEOUT_S)
    assert stored == [Stored(PAGES)]
    on_host = np.zeros((PAGES, rig.geometry.page_bytes), np.uint8)
    assert ns.load(rig.tokens, on_host) == PAGES
    assert np.array_equal(on_host, rig.rooms.pages(computed))


def test_load_comes_after_what_was_queued_on_its_memory(
    device: ModelDevice, client: kvw.Client, rng: random.Random
) -> None:
    """torch's allocator gives memory away while the stream still works on it."""
    rig = Rig(device, rng, "bfloat16")
    ns = client.open(rig.space)
    rig.rooms.fill(rig.rooms.noise())
    before = rig.rooms.pages()
    assert rig.way.store(ns, rig.tokens, rig.rooms.tensors, 0, TIMEOUT_S) == Stored(PAGES)
    device.set("hold", 1)
    for memory, junk in zip(rig.rooms.memories, rig.rooms.noise(), strict=True):
        memory.queue_fill(junk)
    loaded: list[int] = []
    thread = threading.Thread(
        target=lambda: loaded.append(rig.way.load(ns, rig.tokens, rig.rooms.tensors, TIMEOUT_S))
    )
    thread.start()
    assert not loaded
    device.set("hold", 0)
    thread.join(TIMEOUT_S)
    assert loaded == [PAGES]
    eventually(ModelStream(device).recorded().query, "what was queued is over")
    assert np.array_equal(rig.rooms.pages(), before)


def test_way_that_is_refused_turns_all_to_the_buffer_and_is_counted_once(
    device: ModelDevice, client: kvw.Client, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(device, rng, "bfloat16")
    monkeypatch.setenv("KVW_NVRTC", "/nonexistent/libnvrtc.so")
    kernels.compiled.cache_clear()
    with Fresh(client) as fresh:
        ns = fresh.open(rig.space)
        rooms = rig.rooms.tensors
        rig.way.store(ns, rig.tokens, rooms, 0, TIMEOUT_S, rig.way.computed(rooms))
        rig.way.load(ns, rig.tokens, rooms, TIMEOUT_S)
        rig.way.computed(rooms)
    assert rig.staged.calls == ["store", "load", "computed"]
    assert len(rig.fallbacks) == 1
    assert "NVRTC" in rig.copies.reason


class Fresh:
    """Another client of the same daemon, which has no kernels yet."""

    def __init__(self, client: kvw.Client) -> None:
        self._made = kvw.connect(client.address)

    def __enter__(self) -> kvw.Client:
        return self._made

    def __exit__(self, *_: object) -> None:
        self._made.close()


def test_rooms_that_a_hanging_device_may_write_to_are_never_freed_and_not_loaded_otherwise(
    device: ModelDevice, rng: random.Random
) -> None:
    from kvwarehouse_connectors.core import device_copies

    rig = Rig(device, rng, "bfloat16")

    class Hanging:
        def load(self, *_: Any, **__: Any) -> kvw.Loaded:
            raise kvw.StorageError("device 0 has not finished", code="gpu_stalled")

    rooms = rig.rooms.tensors
    with pytest.raises(kvw.StorageError):
        rig.way.load(Hanging(), rig.tokens, rooms, 1.0)  # type: ignore[arg-type]
    assert device_copies._kept.pop() is rooms
    assert rig.staged.calls == []


# --- in the whole of the connector, on the CPU


class Watched:
    """Another transfer, and in which thread each of its calls was made."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.threads: dict[str, int] = {}
        self.event = object()
        self.given: Any = None
        self.caches: list[int] = []

    def load(self, space: Any, tokens: Any, rooms: Any, timeout_s: float) -> int:
        self.caches.append(rooms[0].data_ptr())
        raise kvw.StorageError("device 0 has not finished", code="gpu_stalled")

    def computed(self, rooms: Any) -> Any:
        self.threads["computed"] = threading.get_ident()
        return self.event

    def store(
        self, space: Any, tokens: Any, rooms: Any, first: int, timeout_s: float, after: Any = None
    ) -> Stored:
        self.threads["store"] = threading.get_ident()
        self.given = after
        stored: Stored = self._inner.store(space, tokens, rooms, first, timeout_s)
        return stored

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def prefiller(
    model: Any, warehouse: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[WarehousePrefill, Watched]]:
    options = PrefillOptions(page_tokens=16, chunk_tokens=32)
    with WarehousePrefill(model, warehouse, weights="tiny", options=options) as prefiller:
        watched = Watched(prefiller._transfer)
        monkeypatch.setattr(prefiller, "_transfer", watched)
        yield prefiller, watched


def test_event_of_a_store_is_recorded_by_the_thread_that_computed(
    prefiller: tuple[WarehousePrefill, Watched], prompt: Any
) -> None:
    prefill, watched = prefiller
    prefill.prefill(prompt)
    assert prefill.flush()
    assert watched.given is watched.event
    assert watched.threads["computed"] == threading.get_ident() != watched.threads["store"]


def test_prompt_is_not_computed_into_the_cache_of_a_failed_load(
    torch: Any, prefiller: tuple[WarehousePrefill, Watched], prompt: Any
) -> None:
    prefill, watched = prefiller
    computed = prefill.prefill(prompt)
    assert prefill.flush()
    kept: list[Any] = []
    inner = prefill._cache
    prefill._cache = lambda tokens: kept.append(inner(tokens)) or kept[-1]  # type: ignore[assignment,method-assign,func-returns-value]
    again = prefill.prefill(prompt)
    assert "gpu_stalled" not in str(computed.reuse.failure)
    assert "has not finished" in str(again.reuse.failure)
    assert len(kept) == 2
    assert again.cache is kept[1]
    assert kept[0].rooms[0].data_ptr() == watched.caches[0]
    assert torch.equal(again.logits, computed.logits)


def test_wish_that_is_none_is_refused() -> None:
    with pytest.raises(kvw.UsageError, match="device_copies is 'on'"):
        PrefillOptions(device_copies="on")
