"""Pages on NVMe to the memory of a device, past the daemon and past the host's memory: held by a
real daemon's client, brought by the contract model of kvikio, verified and scattered by the kernels
on the contract model of CUDA's driver. Not a GPU: tests/gpu/test_nvme_to_gpu.py is for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.client.landing import HostLanding
from kvwarehouse.client.mover import PreadMover
from kvwarehouse.client.nvme_reader import NvmeReader
from kvwarehouse.gpu import Choice, DeviceLanding, Lane, Machine, Rates, reader
from kvwarehouse.gpu.kvikio_mover import KvikioMover
from kvwarehouse.testing.cuda_model import ModelDevice
from kvwarehouse.testing.kvikio_model import KvikioModel
from kvwarehouse.testing.pages import pages_of
from kvwarehouse.testing.serving import Serving
from kvwarehouse.testing.until import until

PAGE_TOKENS = 4
PAGE_BYTES = 20_008  # no multiple of a block or of a leaf
PAGES = 24
PIECES = 2

pytestmark = pytest.mark.usefixtures("contract_kept")


def space(salt: str = "") -> kvw.Namespace:
    return kvw.Namespace(
        model="device",
        weights="w",
        dtype="uint8",
        layout="test/1",
        page_tokens=PAGE_TOKENS,
        page_bytes=PAGE_BYTES,
        salt=salt,
    )


TOKENS = np.arange(PAGES * PAGE_TOKENS, dtype=np.uint32)
ROWS = pages_of(range(PAGES), 0, 0, PAGE_BYTES)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="16MiB", nvme_capacity="8MiB") as serving:
        yield serving


@pytest.fixture
def client(serving: Serving) -> Iterator[kvw.Client]:
    with serving.connect(timeout_s=60) as client:
        yield client


@pytest.fixture
def ns(client: kvw.Client) -> kvw.OpenNamespace:
    """With all of its pages on NVMe alone."""
    ns = client.open(space())
    assert ns.store(TOKENS, ROWS, timeout_s=60).stored == PAGES
    to_nvme(client)
    return ns


@pytest.fixture
def kvikio(device: ModelDevice) -> KvikioModel:
    return kvikio_of(device)


def kvikio_of(device: ModelDevice, change: Callable[[Any], None] | None = None) -> KvikioModel:
    """change: what happens to bytes on their way."""

    def write(target: Any, data: bytes) -> None:
        landed = np.frombuffer(data, np.uint8).copy()
        if change is not None:
            change(landed)
        device.poke(target.address, landed)

    return KvikioModel(write)


def to_nvme(client: kvw.Client) -> None:
    assert client.flush().pending == 0
    client.evict(None, 100_000, "dram")


def through(ns: kvw.OpenNamespace, kvikio: KvikioModel, stage_bytes: int = 1 << 20) -> NvmeReader:
    mover = KvikioMover(gds=True, library=kvikio)
    return NvmeReader(ns, mover, DeviceLanding(ns, 0, stage_bytes))


def blank(device: ModelDevice) -> Any:
    return device.array(np.zeros_like(ROWS))


def by_reason(client: kvw.Client) -> dict[str, int]:
    native: Any = client._path  # counters of this client alone
    found: dict[str, int] = native.native.counters()
    return found


@pytest.mark.parametrize("stage_bytes", [24 << 10, 100 << 10, 1 << 20])
def test_pages_are_brought_to_the_device_whatever_its_stages_hold(
    device: ModelDevice, ns: Any, kvikio: KvikioModel, client: kvw.Client, stage_bytes: int
) -> None:
    out = blank(device)
    with through(ns, kvikio, stage_bytes) as nvme:
        assert nvme.load(TOKENS, out, timeout_s=60) == PAGES
        assert nvme.failures == {}
        assert nvme.pages_read == PAGES
    assert (device.read(out) == ROWS).all()
    assert by_reason(client)["pages_loaded"] == PAGES
    # Not promoted: nothing went by DRAM.
    assert ns.lookup(TOKENS).by_tier == {"dram": 0, "nvme": PAGES}
    assert not kvikio.open


def test_pages_are_scattered_to_the_blocks_of_a_paged_cache(
    device: ModelDevice, ns: Any, kvikio: KvikioModel
) -> None:
    piece = PAGE_BYTES // PIECES
    order = [int(block) for block in np.random.default_rng(3).permutation(2 * PAGES)[:PAGES]]
    cache = device.array(np.zeros((PIECES, 2 * PAGES * piece), np.uint8))
    regions = kvw.Regions.strided(
        [cache],
        [device.address(cache) + row * 2 * PAGES * piece for row in range(PIECES)],
        [piece] * PIECES,
        [piece] * PIECES,
        [[block] for block in order],
    ).on_device()
    with through(ns, kvikio) as nvme:
        assert nvme.load(TOKENS, regions, timeout_s=60) == PAGES
        assert nvme.pages_read == PAGES
    held = device.read(cache).reshape(PIECES, 2 * PAGES, piece)
    for page, block in enumerate(order):
        assert (held[:, block].reshape(-1) == ROWS[page]).all()
    others = [block for block in range(2 * PAGES) if block not in order]
    assert not held[:, others].any()


def test_pages_of_both_tiers_come_each_its_way(
    device: ModelDevice, ns: Any, kvikio: KvikioModel
) -> None:
    host = np.zeros((7, PAGE_BYTES), np.uint8)
    assert ns.load(TOKENS[: 7 * PAGE_TOKENS], host, timeout_s=60) == 7
    out = blank(device)
    with through(ns, kvikio) as nvme:
        assert nvme.load(TOKENS, out, timeout_s=60) == PAGES
        assert nvme.pages_read == PAGES - 7
    assert (device.read(out) == ROWS).all()


@pytest.mark.parametrize("at", [0, PAGE_BYTES // 2, PAGE_BYTES - 1])
def test_byte_that_changes_on_its_way_is_never_handed_over(
    device: ModelDevice, ns: Any, client: kvw.Client, at: int
) -> None:
    def change(landed: Any) -> None:
        landed[at] ^= 0x10

    out = blank(device)
    with through(ns, kvikio_of(device, change)) as nvme:
        # The daemon's own read finds nothing wrong with the records.
        assert nvme.load(TOKENS, out, timeout_s=60) == PAGES
        assert nvme.failures == {"a page is not what its record says, or was cleared": 1}
    assert (device.read(out) == ROWS).all()
    assert by_reason(client)["load_mismatch"] == 1


def test_failed_transfer_goes_the_daemons_way(
    device: ModelDevice, ns: Any, kvikio: KvikioModel
) -> None:
    kvikio.error = RuntimeError("cuFile: error 5028")
    out = blank(device)
    with through(ns, kvikio) as nvme:
        assert nvme.load(TOKENS, out, timeout_s=60) == PAGES
        assert nvme.pages_read == 0
        assert list(nvme.failures) == ["cuFile: error 5028"]
    assert (device.read(out) == ROWS).all()


def test_cleared_page_is_not_handed_over_though_its_bytes_landed(
    device: ModelDevice, ns: Any, client: kvw.Client
) -> None:
    def clear(landed: Any) -> None:
        client.clear(ns.space)

    out = blank(device)
    with through(ns, kvikio_of(device, clear)) as nvme:
        assert nvme.load(TOKENS, out, timeout_s=60) == 0


def test_pages_are_not_written_before_the_event_of_the_engine(
    device: ModelDevice, ns: Any, kvikio: KvikioModel
) -> None:
    out = blank(device)
    early = np.full_like(ROWS, 7)
    # Were it not waited for, the engine's own write would come last.
    regions = kvw.Regions.rows(out, writable=True).on_device(after=device.queue_fill(out, early))
    with through(ns, kvikio) as nvme:
        assert nvme.load(TOKENS, regions, timeout_s=60) == PAGES
    assert (device.read(out) == ROWS).all()


def test_engine_that_is_not_done_in_time_gets_nothing(
    device: ModelDevice, ns: Any, kvikio: KvikioModel
) -> None:
    out = blank(device)
    device.set("hold", 1)
    regions = kvw.Regions.rows(out, writable=True).on_device(after=device.queue_fill(out, ROWS))
    with through(ns, kvikio) as nvme:
        loaded = nvme.load(TOKENS, regions, timeout_s=0.2)
        assert loaded == 0
        assert loaded.missed == {"timeout": PAGES}
        assert nvme.failures == {"pages were not verified within the load's time": 1}
        device.set("hold", 0)
        assert nvme.load(TOKENS, blank(device), timeout_s=60) == PAGES


def test_device_that_is_lost_at_work_keeps_the_stage_that_it_may_be_reading(
    device: ModelDevice, ns: Any, kvikio: KvikioModel
) -> None:
    out = blank(device)
    nvme = through(ns, kvikio)
    before = device.count("device_bytes")
    copies = device.count("copies")
    device.set("hold", 1)
    with ThreadPoolExecutor(1) as threads:
        load = threads.submit(nvme.load, TOKENS, out, timeout_s=60)
        until(lambda: device.count("copies") > copies, "the device has work")
        device.set("lost", 1)
        device.set("hold", 0)
        with pytest.raises(kvw.StorageError) as lost:
            load.result()
    assert lost.value.code in ("gpu_error", "gpu_stalled")
    device.set("lost", 0)
    with pytest.raises(kvw.StorageError, match="earlier delivery"):
        nvme.load(TOKENS, out, timeout_s=60)
    nvme.close()
    del nvme, load, lost
    # The other of the two stages went.
    kept = device.count("device_bytes") - before
    assert -(1 << 20) <= kept < 0


def test_landing_of_another_place_than_the_pages_is_refused(
    device: ModelDevice, ns: Any, kvikio: KvikioModel
) -> None:
    with through(ns, kvikio) as nvme, pytest.raises(kvw.UsageError, match="host memory"):
        nvme.load(TOKENS, np.zeros_like(ROWS), timeout_s=60)
    on_host = NvmeReader(ns, PreadMover(), HostLanding())
    with on_host, pytest.raises(kvw.UsageError, match="device 0"):
        on_host.load(TOKENS, blank(device), timeout_s=60)


def test_stages_are_freed_with_their_landing(device: ModelDevice, ns: Any) -> None:
    before = device.count("device_bytes")
    landing = DeviceLanding(ns, 0, 1 << 20)
    assert device.count("device_bytes") == before + (2 << 20)
    del landing
    assert device.count("device_bytes") == before


def test_remote_client_has_no_device(serving: Serving, client: kvw.Client, ns: Any) -> None:
    with serving.connect_remote() as remote, pytest.raises(kvw.UsageError, match="unix"):
        DeviceLanding(remote.open(space()), 0)


@pytest.mark.parametrize(
    ("lane", "name"), [(Lane.GDS, "kvikio (GDS)"), (Lane.COMPAT, "kvikio (compat)")]
)
def test_reader_goes_the_way_that_was_chosen(
    device: ModelDevice, ns: Any, kvikio: KvikioModel, lane: Lane, name: str
) -> None:
    choice = Choice(lane, "the fastest that was measured", Machine(), Rates())
    made = reader(ns, 0, choice, library=kvikio)
    assert made is not None
    out = blank(device)
    with made as nvme:
        assert nvme.mover.name == name
        assert nvme.load(TOKENS, out, timeout_s=60) == PAGES
    assert (device.read(out) == ROWS).all()


def test_there_is_no_reader_where_the_daemons_promotion_is_the_fastest(ns: Any) -> None:
    assert reader(ns, 0, Choice(Lane.DRAM, "there is no GPU", Machine(), Rates())) is None
