"""The connectors' pages on a real GPU: torch's tensors, streams and events where
tests/integration/pinned has the contract model's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.core.daemon_connection import ConnectionOptions, DaemonConnection
from kvwarehouse_connectors.core.layout import BlockLayout, by_memory, pieces_of
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.self_test import SelfTest
from kvwarehouse_connectors.core.store_queue import StoreQueue
from testkit.tiny_llama import tiny_llama

BLOCKS = 9
TIMEOUT_S = 60.0
SLEEP_CYCLES = 500_000_000  # some tenths of a second: what does not wait is done long before
# (shape after the blocks, order of dimensions in memory)
LAYOUTS = {
    "NHD": ((16, 4, 64), (0, 1, 2, 3)),
    "HND": ((16, 4, 64), (0, 2, 1, 3)),
    "keys then values": ((2, 16, 4, 64), (1, 0, 2, 3, 4)),
    "MLA": ((16, 1, 576), (0, 1, 2, 3)),
    "large": ((16, 8, 1024), (0, 1, 2, 3)),
}
DTYPES = ("bfloat16", "float8_e4m3fn", "int8")


@pytest.fixture(scope="session")
def torch() -> Any:
    found = pytest.importorskip("torch", reason="needs torch with CUDA")
    if not found.cuda.is_available():
        pytest.skip("needs a GPU that torch can use: torch.cuda.is_available() is False")
    return found


@pytest.fixture
def serving(torch: Any, tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="256MiB") as serving:
        yield serving


class Rig:
    """Three layers on the device, and their memory as the connector for vLLM makes it."""

    def __init__(self, torch: Any, serving: Serving, name: str, dtype: str) -> None:
        from kvwarehouse_connectors.core.pinned_memory import PinnedMemory
        from kvwarehouse_connectors.core.tensor_memory import TensorMemories

        self.torch = torch
        self.fallbacks: list[None] = []
        self.views = [_view(torch, name, dtype) for _ in range(3)]
        pieces = [piece for view in self.views for piece in pieces_of(view)[0]]
        bases, strides, sizes = zip(*pieces, strict=True)
        layout = BlockLayout(
            tuple(self.views),
            np.array(bases, np.uint64),
            np.array(strides, np.int64),
            np.array(sizes, np.uint64),
            "test",
        )
        made = TensorMemories("auto", lambda: self.fallbacks.append(None))
        self.memory = made.memory(layout, self.views, BLOCKS)
        assert isinstance(self.memory, PinnedMemory), "the log says why not"
        self.connection = DaemonConnection(serving.address, ConnectionOptions(tick_s=0.01))
        self.results: list[kvw.StoreResult] = []
        self.store_queue = StoreQueue(
            self.connection,
            SimpleNamespace(staging_bytes=64 << 20, store_timeout_s=TIMEOUT_S),
            0,
            lambda runs, result: self.results.append(result),
        )
        self.space = kvw.Namespace(
            model="gpu",
            weights="w",
            dtype=dtype,
            layout=name,
            page_tokens=16,
            page_bytes=self.memory.block_bytes,
        )
        opened = self.connection.wait_namespace(self.space, TIMEOUT_S)
        assert opened is not None
        self.opened = opened
        self.connection.prepare_device(int(bases[0]))
        self._warm_up()

    def _warm_up(self) -> None:
        """What happens once, and may wait for the device, has happened before a test holds up the
        engine's stream: memory of movers is allocated, the arena is being registered."""
        run = PageRun(0, [b"w" * 32], [0], True)
        assert self.store_queue.put([run], self.space, self.memory)
        eventually(lambda: self.results, "it is stored")
        self.memory.after_engine()
        assert self.memory.load(self.opened, run, 0, 0, TIMEOUT_S) == 1
        self.results.clear()

    def fill(self, rng: random.Random) -> None:
        """Noise, queued on the current stream."""
        for view in self.views:
            whole = _bytes(self.torch, view)
            data = np.frombuffer(rng.randbytes(whole.numel()), np.uint8).copy()
            whole.copy_(self.torch.from_numpy(data))

    def pages(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        rows = [by_memory(view).contiguous().reshape(BLOCKS, -1) for view in self.views]
        return np.concatenate([row.view(self.torch.uint8).cpu().numpy() for row in rows], axis=1)

    def stored(self, run: PageRun) -> np.ndarray[Any, np.dtype[np.uint8]]:
        rows = np.zeros((len(run.keys), self.memory.block_bytes), np.uint8)
        assert self.opened.load(keys=run.key_runs(), out=rows) == len(rows)
        return rows

    def close(self) -> None:
        self.store_queue.close()
        self.connection.close()


def _view(torch: Any, name: str, dtype: str) -> Any:
    inner, order = LAYOUTS[name]
    shape = (BLOCKS, *inner)
    whole = torch.zeros([shape[d] for d in order], dtype=getattr(torch, dtype), device="cuda")
    return whole.permute(*(order.index(d) for d in range(len(order))))


def _bytes(torch: Any, view: Any) -> Any:
    whole = torch.empty(0, dtype=torch.uint8, device=view.device)
    return whole.set_(view.untyped_storage())


def _run(rng: random.Random, *blocks: int) -> PageRun:
    return PageRun(0, [rng.randbytes(32) for _ in blocks], list(blocks), True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_go_out_and_come_back_byte_for_byte(
    torch: Any, serving: Serving, rng: random.Random, name: str, dtype: str
) -> None:
    rig = Rig(torch, serving, name, dtype)
    try:
        rig.fill(rng)
        before = rig.pages()
        run = _run(rng, 7, 0, 3)
        assert rig.store_queue.put([run], rig.space, rig.memory)
        eventually(lambda: rig.results, "it is stored")
        assert rig.results == [kvw.StoreResult(3, 0, {})]
        assert np.array_equal(rig.stored(run), before[run.blocks])
        back = PageRun(0, run.keys, [1, 8, 4], True)
        rig.memory.after_engine()
        assert rig.memory.load(rig.opened, back, 0, 0, TIMEOUT_S) == 3
        before[back.blocks] = before[run.blocks]
        assert np.array_equal(rig.pages(), before)
        assert not rig.fallbacks
    finally:
        rig.close()


def test_tensors_and_way_are_proven_and_hold_what_they_held(
    torch: Any, serving: Serving, rng: random.Random
) -> None:
    from kvwarehouse_connectors.core.layout_self_test import check_tensors

    rig = Rig(torch, serving, "HND", "bfloat16")
    try:
        rig.fill(rng)
        before = rig.pages()
        check_tensors(rig.memory, rig.views, BLOCKS)
        assert SelfTest(rig.connection, stores=True).round_trip(rig.memory, [3, 5])
        assert np.array_equal(rig.pages(), before)
        assert not rig.fallbacks
    finally:
        rig.close()


def test_store_has_the_step_it_was_ordered_in_and_nothing_holds_up_the_engines_stream(
    torch: Any, serving: Serving, rng: random.Random
) -> None:
    rig = Rig(torch, serving, "NHD", "bfloat16")
    stream = torch.cuda.Stream()
    try:
        rig.fill(rng)
        step = [
            torch.randint(0, 256, (_bytes(torch, v).numel(),), dtype=torch.uint8).cuda()
            for v in rig.views
        ]
        for round_number in range(3):
            run = _run(rng, 4, 6)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP_CYCLES)
                for view, data in zip(rig.views, step, strict=True):
                    _bytes(torch, view).copy_(data)
                assert rig.store_queue.put([run], rig.space, rig.memory)
                rig.memory.after_engine()
                assert not stream.query(), "nobody waited for the stream"
                for view in rig.views:
                    _bytes(torch, view).zero_()  # the next step
            eventually(lambda n=round_number: len(rig.results) == n + 1, "it is stored")
            stream.synchronize()
            expected = rig.pages()
            assert not expected.any()
            for view, data in zip(rig.views, step, strict=True):
                _bytes(torch, view).copy_(data)
            assert np.array_equal(rig.stored(run), rig.pages()[run.blocks])
    finally:
        rig.close()


def test_load_comes_after_the_step_that_still_writes_its_blocks(
    torch: Any, serving: Serving, rng: random.Random
) -> None:
    rig = Rig(torch, serving, "keys then values", "bfloat16")
    stream = torch.cuda.Stream()
    try:
        rig.fill(rng)
        before = rig.pages()
        run = _run(rng, 2, 5)
        assert rig.store_queue.put([run], rig.space, rig.memory)
        eventually(lambda: rig.results, "it is stored")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            for view in rig.views:
                _bytes(torch, view).fill_(7)
            rig.memory.after_engine()
        assert rig.memory.load(rig.opened, run, 0, 0, TIMEOUT_S) == 2
        stream.synchronize()
        after = rig.pages()
        assert np.array_equal(after[run.blocks], before[run.blocks])
        assert (after[[0, 1, 3, 4]] == 7).all()
    finally:
        rig.close()


def test_transformers_reuse_a_prompt_bit_for_bit(torch: Any, serving: Serving) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from kvwarehouse_connectors.transformers import PrefillOptions, WarehousePrefill

    model = tiny_llama(torch, transformers).cuda()
    prompt = torch.randint(0, 512, (1, 150))
    with serving.connect(timeout_s=TIMEOUT_S) as client:
        results = {}
        for wish in ("auto", "off"):
            options = PrefillOptions(page_tokens=16, chunk_tokens=32, device_copies=wish)
            with WarehousePrefill(model, client, weights=wish, options=options) as prefill:
                computed = prefill.prefill(prompt)
                assert prefill.flush()
                reused = prefill.prefill(prompt)
                assert reused.tokens_loaded == 128
                assert prefill.stats().device_fallbacks == 0
                assert torch.equal(computed.logits, reused.logits)
                results[wish] = reused.logits
        assert torch.equal(results["auto"], results["off"])
