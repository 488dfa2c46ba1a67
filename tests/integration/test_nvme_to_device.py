"""Pages on NVMe to the memory of a device, past the daemon and past the host's memory: held by a
real daemon's client, brought by the contract model of kvikio, verified and scattered by the kernels
on the contract model of CUDA's driver. Not a GPU: tests/gpu/test_nvme_to_gpu.py is for one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.gpu import (
    AutoPath,
    Choice,
    DeviceStagingArea,
    LoadPath,
    Machine,
    Rates,
    auto_path,
    reader,
)
from kvwarehouse.gpu.file_reader import KvikioReader, PreadReader
from kvwarehouse.gpu.nvme_reader import NvmeReader
from kvwarehouse.gpu.staging_area import STAGE_BYTES, HostStagingArea
from kvwarehouse_bench.harness.eventually import eventually, longer_bounds
from kvwarehouse_bench.harness.pages import pages_of
from kvwarehouse_bench.harness.serving import Serving
from testkit.accounting import counters_of
from testkit.cuda_model import ModelDevice
from testkit.fleet_secrets import secret_file
from testkit.gpu_paths import Choosing, KvikioModel, kvikio_of

PAGE_TOKENS = 4
PAGE_BYTES = 20_008  # no multiple of a block or of a leaf
PAGES = 24
PIECES = 2

pytestmark = pytest.mark.usefixtures("contract_kept")


SPACE = kvw.Namespace(
    model="device",
    weights="w",
    dtype="uint8",
    layout="test/1",
    page_tokens=PAGE_TOKENS,
    page_bytes=PAGE_BYTES,
)
TOKENS = np.arange(PAGES * PAGE_TOKENS, dtype=np.uint32)
ROWS = pages_of(range(PAGES), 0, 0, PAGE_BYTES)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("daemon")
    sizes = {"dram": "16MiB", "nvme_capacity": "8MiB"}
    with Serving(folder, fleet_secret=secret_file(folder), **sizes) as serving:
        yield serving


@pytest.fixture
def serving(daemon: Serving) -> Iterator[Serving]:
    """The file's, empty after each test."""
    yield daemon
    with daemon.connect(timeout_s=60) as client:
        client.clear(all=True)


@pytest.fixture
def client(serving: Serving) -> Iterator[kvw.Client]:
    with serving.connect(timeout_s=60) as client:
        yield client


@pytest.fixture
def ns(client: kvw.Client) -> kvw.OpenNamespace:
    """With all of its pages on NVMe alone."""
    ns = client.open(SPACE)
    assert ns.store(TOKENS, ROWS, timeout_s=60).stored == PAGES
    to_nvme(client)
    return ns


@pytest.fixture
def kvikio(device: ModelDevice) -> KvikioModel:
    return kvikio_of(device)


def to_nvme(client: kvw.Client) -> None:
    assert client.flush().pending == 0
    client.evict(None, 100_000, "dram")


def through(ns: kvw.OpenNamespace, kvikio: KvikioModel, stage_bytes: int = 1 << 20) -> NvmeReader:
    file_reader = KvikioReader(gds=True, library=kvikio)
    return NvmeReader(file_reader, DeviceStagingArea(ns, 0, stage_bytes))


def blank(device: ModelDevice) -> Any:
    return device.array(np.zeros_like(ROWS))


@pytest.mark.parametrize("stage_bytes", [24 << 10, 100 << 10, 1 << 20])
def test_pages_are_brought_to_the_device_whatever_its_stages_hold(
    device: ModelDevice, ns: Any, kvikio: KvikioModel, client: kvw.Client, stage_bytes: int
) -> None:
    out = blank(device)
    with through(ns, kvikio, stage_bytes) as nvme:
        assert nvme.load(ns, TOKENS, out, timeout_s=60) == PAGES
        assert nvme.failures == {}
        assert nvme.pages_read == PAGES
    assert (device.read(out) == ROWS).all()
    assert counters_of(client)["pages_loaded"] == PAGES
    # Not promoted: nothing went by DRAM.
    assert ns.lookup(TOKENS).by_tier == {"hbm": 0, "dram": 0, "nvme": PAGES, "remote": 0}
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
        assert nvme.load(ns, TOKENS, regions, timeout_s=60) == PAGES
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
        assert nvme.load(ns, TOKENS, out, timeout_s=60) == PAGES
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
        assert nvme.load(ns, TOKENS, out, timeout_s=60) == PAGES
        assert nvme.failures == {"a page is not what its record says, or was cleared": 1}
    assert (device.read(out) == ROWS).all()
    assert counters_of(client)["load_mismatch"] == 1


def test_failed_transfer_goes_the_daemons_way(
    device: ModelDevice, ns: Any, kvikio: KvikioModel
) -> None:
    kvikio.error = RuntimeError("cuFile: error 5028")
    out = blank(device)
    with through(ns, kvikio) as nvme:
        assert nvme.load(ns, TOKENS, out, timeout_s=60) == PAGES
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
        assert nvme.load(ns, TOKENS, out, timeout_s=60) == 0


def test_pages_are_not_written_before_the_event_of_the_engine(
    device: ModelDevice, ns: Any, kvikio: KvikioModel
) -> None:
    out = blank(device)
    early = np.full_like(ROWS, 7)
    # Were it not waited for, the engine's own write would come last.
    regions = kvw.Regions.rows(out, writable=True).on_device(after=device.queue_fill(out, early))
    with through(ns, kvikio) as nvme:
        assert nvme.load(ns, TOKENS, regions, timeout_s=60) == PAGES
    assert (device.read(out) == ROWS).all()


def test_pages_are_not_written_before_what_the_stream_of_their_array_has_queued(
    device: ModelDevice, ns: Any, kvikio: KvikioModel
) -> None:
    out = blank(device)
    with device.current("engine"), through(ns, kvikio) as nvme:
        event = device.queue_fill(out, np.full_like(ROWS, 7))
        assert nvme.load(ns, TOKENS, out, timeout_s=60) == PAGES
    assert device.happened(event)
    assert (device.read(out) == ROWS).all()


def test_engine_that_is_not_done_in_time_gets_nothing(
    device: ModelDevice, ns: Any, kvikio: KvikioModel
) -> None:
    out = blank(device)
    device.set("hold", 1)
    regions = kvw.Regions.rows(out, writable=True).on_device(after=device.queue_fill(out, ROWS))
    with through(ns, kvikio) as nvme:
        for bound_s in longer_bounds(0.2):
            loaded = nvme.load(ns, TOKENS, regions, timeout_s=bound_s)
            assert loaded == 0
            assert loaded.missed == {"timeout": PAGES}
            if nvme.failures:  # it came to the device within the bound
                break
        assert nvme.failures == {"pages were not verified within the load's time": 1}
        device.set("hold", 0)
        assert nvme.load(ns, TOKENS, blank(device), timeout_s=60) == PAGES


def test_device_that_is_lost_at_work_keeps_the_stage_that_it_may_be_reading(
    device: ModelDevice, ns: Any, kvikio: KvikioModel
) -> None:
    out = blank(device)
    without = device.count("device_bytes")
    nvme = through(ns, kvikio)
    nvme.load(ns, TOKENS, out, timeout_s=60)  # takes what its batches need
    both = device.count("device_bytes")
    copies = device.count("copies")
    device.set("hold", 1)
    with ThreadPoolExecutor(1) as threads:
        load = threads.submit(nvme.load, ns, TOKENS, out, timeout_s=60)
        eventually(lambda: device.count("copies") > copies, "the device has work")
        device.set("lost", 1)
        device.set("hold", 0)
        with pytest.raises(kvw.StorageError) as lost:
            load.result()
    assert lost.value.code in ("gpu_error", "gpu_stalled")
    device.set("lost", 0)
    with pytest.raises(kvw.StorageError, match="earlier delivery"):
        nvme.load(ns, TOKENS, out, timeout_s=60)
    nvme.close()
    del nvme, load, lost
    # The other of the two stages went.
    assert without < device.count("device_bytes") < both


def test_staging_area_of_another_place_than_the_pages_is_refused(
    device: ModelDevice, ns: Any, kvikio: KvikioModel
) -> None:
    with through(ns, kvikio) as nvme, pytest.raises(kvw.UsageError, match="host memory"):
        nvme.load(ns, TOKENS, np.zeros_like(ROWS), timeout_s=60)
    on_host = NvmeReader(PreadReader(), HostStagingArea())
    with on_host, pytest.raises(kvw.UsageError, match="device 0"):
        on_host.load(ns, TOKENS, blank(device), timeout_s=60)


def test_reads_beside_a_captured_graph_arrive_and_do_not_break_it(
    device: ModelDevice, ns: Any, kvikio: KvikioModel
) -> None:
    out = blank(device)
    with through(ns, kvikio) as nvme:
        broken = device.count("broken_captures")
        device.set("capture", 1)
        try:
            loaded = nvme.load(ns, TOKENS, out, timeout_s=60)
        finally:
            device.set("capture", 0)
        assert loaded == PAGES
        assert nvme.pages_read == PAGES
        assert device.count("broken_captures") == broken


def test_stages_are_freed_with_their_staging_area(device: ModelDevice, ns: Any) -> None:
    DeviceStagingArea(ns, 0, 1 << 20)  # its client has the device from now on, and what that needs
    before = device.count("device_bytes")
    staging = DeviceStagingArea(ns, 0, 1 << 20)
    assert device.count("device_bytes") == before + (2 << 20)
    del staging
    assert device.count("device_bytes") == before


def test_remote_client_has_no_device(serving: Serving, client: kvw.Client, ns: Any) -> None:
    with serving.connect_remote() as remote, pytest.raises(kvw.UsageError, match="unix"):
        DeviceStagingArea(remote.open(SPACE), 0)


@pytest.mark.parametrize(
    ("path", "name"), [(LoadPath.GDS, "kvikio (GDS)"), (LoadPath.COMPAT, "kvikio (compat)")]
)
def test_reader_goes_the_way_that_was_chosen(
    device: ModelDevice, ns: Any, kvikio: KvikioModel, path: LoadPath, name: str
) -> None:
    choice = Choice(path, "the fastest that was measured", Machine(), Rates())
    made = reader(ns, 0, choice, library=kvikio)
    assert made is not None
    out = blank(device)
    with made as nvme:
        assert nvme.file_reader.name == name
        assert nvme.load(ns, TOKENS, out, timeout_s=60) == PAGES
    assert (device.read(out) == ROWS).all()


def test_there_is_no_reader_where_the_daemons_promotion_is_the_fastest(ns: Any) -> None:
    assert reader(ns, 0, Choice(LoadPath.DRAM, "there is no GPU", Machine(), Rates())) is None


@pytest.fixture
def much(client: kvw.Client, ns: kvw.OpenNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough on NVMe to measure with, and a daemon that may be slow to say where it is: what it
    does not say in time is asked for again a minute later."""
    monkeypatch.setattr("kvwarehouse.gpu.auto_path.LEAST_BYTES", 4096)
    monkeypatch.setattr("kvwarehouse.gpu.auto_path._ASK_S", 60.0)


def found(path: AutoPath) -> None:
    eventually(lambda: path._reader or path.problem, "the path is chosen, and ready")


@pytest.mark.usefixtures("much")
def test_loads_go_by_the_path_that_is_found_to_be_the_fastest(
    device: ModelDevice, ns: Any, kvikio: KvikioModel, client: kvw.Client
) -> None:
    choosing = Choosing(LoadPath.GDS)
    path = AutoPath(0, select=choosing, library=kvikio)
    out = blank(device)
    # Nobody waits for a choice: the first load is the daemon's.
    assert path.load(ns, TOKENS, out, timeout_s=60) == PAGES
    assert kvikio.opened == 0
    found(path)
    to_nvme(client)
    out = blank(device)
    assert path.load(ns, TOKENS, out, timeout_s=60) == PAGES
    assert kvikio.opened > 0
    assert ns.lookup(TOKENS).by_tier == {"hbm": 0, "dram": 0, "nvme": PAGES, "remote": 0}
    assert (device.read(out) == ROWS).all()
    # The second time it comes into DRAM for the third.
    assert path.load(ns, TOKENS, blank(device), timeout_s=60) == PAGES
    assert ns.lookup(TOKENS).by_tier == {"hbm": 0, "dram": PAGES, "nvme": 0, "remote": 0}
    assert len(choosing.asked) == 1
    path.close()
    eventually(lambda: not kvikio.open, "its files are closed")
    assert path.load(ns, TOKENS, blank(device), timeout_s=60) == PAGES


@pytest.mark.usefixtures("much")
def test_promotion_stays_where_it_is_the_fastest(
    device: ModelDevice, ns: Any, kvikio: KvikioModel
) -> None:
    path = AutoPath(0, select=Choosing(LoadPath.DRAM), library=kvikio)
    assert path.load(ns, TOKENS, blank(device), timeout_s=60) == PAGES
    eventually(lambda: path.choice, "the path is chosen")
    assert path.load(ns, TOKENS, blank(device), timeout_s=60) == PAGES
    assert kvikio.opened == 0


def test_nothing_is_measured_before_there_is_something_to_measure_with(
    device: ModelDevice, ns: Any, kvikio: KvikioModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []
    real = auto_path._enough
    monkeypatch.setattr(auto_path, "_AGAIN_S", 0.0)
    monkeypatch.setattr(auto_path, "_enough", lambda at: looks.append(at) or real(at))
    choosing = Choosing(LoadPath.GDS)
    path = AutoPath(0, select=choosing, library=kvikio)
    out = blank(device)

    def looked() -> bool:
        assert path.load(ns, TOKENS, out, timeout_s=60) == PAGES
        return len(looks) > 1

    eventually(looked, "it looks again")
    assert not choosing.asked
    monkeypatch.setattr(auto_path, "LEAST_BYTES", 4096)
    eventually(lambda: looked() and path.choice, "it has chosen")


@pytest.mark.usefixtures("much")
def test_path_that_fails_again_and_again_is_given_up(
    device: ModelDevice, ns: Any, kvikio: KvikioModel, client: kvw.Client, caplog: Any
) -> None:
    path = AutoPath(0, select=Choosing(LoadPath.GDS), library=kvikio)
    path.load(ns, TOKENS, blank(device), timeout_s=60)
    found(path)
    kvikio.error = RuntimeError("cuFile: error 5028")
    out = blank(device)
    for number in range(20):
        # What a reader knows is the daemon's, so each load is of pages that are new to it.
        ns = client.open(dataclasses.replace(SPACE, salt=str(number)))
        assert ns.store(TOKENS, ROWS, timeout_s=60).stored == PAGES
        to_nvme(client)
        assert path.load(ns, TOKENS, out, timeout_s=60) == PAGES
        if path.problem:
            break
    assert "5028" in path.problem
    assert (device.read(out) == ROWS).all()
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


@pytest.mark.usefixtures("much")
def test_device_without_room_for_stages_leaves_the_daemons_way(
    device: ModelDevice, ns: Any, kvikio: KvikioModel, client: kvw.Client
) -> None:
    path = AutoPath(0, select=Choosing(LoadPath.GDS), library=kvikio)
    out = blank(device)
    assert ns.load(TOKENS, out, timeout_s=60) == PAGES  # what a client takes has its room
    device.set("alloc_limit", device.count("device_bytes") + (32 << 20))
    try:
        path.load(ns, TOKENS, out, timeout_s=60)
        found(path)
    finally:
        device.set("alloc_limit", 1 << 40)
    assert "memory" in path.problem
    to_nvme(client)
    assert path.load(ns, TOKENS, out, timeout_s=60) == PAGES
    assert (device.read(out) == ROWS).all()


@pytest.mark.usefixtures("much")
@pytest.mark.parametrize("error", [ValueError, OSError, KeyError])
def test_whatever_is_wrong_with_the_library_the_daemons_way_is_there(
    device: ModelDevice, ns: Any, kvikio: KvikioModel, error: type[Exception]
) -> None:
    def refuse(settings: Any) -> None:
        raise error("compat_mode")

    kvikio.defaults.set = refuse
    path = AutoPath(0, select=Choosing(LoadPath.GDS), library=kvikio)
    out = blank(device)
    assert path.load(ns, TOKENS, out, timeout_s=60) == PAGES
    found(path)
    assert error.__name__ in path.problem
    assert path.load(ns, TOKENS, out, timeout_s=60) == PAGES


@pytest.mark.usefixtures("much")
def test_nothing_is_settled_where_the_device_had_no_room_to_measure(
    device: ModelDevice, ns: Any, kvikio: KvikioModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_path, "_AGAIN_S", 0.0)
    choosing = Choosing(LoadPath.GDS)
    good, choosing.choice = choosing.choice, dataclasses.replace(choosing.choice, rates=Rates())
    path = AutoPath(0, select=choosing, library=kvikio)
    out = blank(device)

    def asked(times: int) -> bool:
        assert path.load(ns, TOKENS, out, timeout_s=60) == PAGES
        return len(choosing.asked) >= times

    eventually(lambda: asked(2), "it asks again")
    assert path.choice is None
    choosing.choice = good
    eventually(lambda: asked(3) and path.choice, "it is chosen")


@pytest.mark.usefixtures("much")
def test_device_that_does_not_answer_holds_nobody_and_gets_its_turn_back(
    device: ModelDevice, ns: Any, kvikio: KvikioModel, client: kvw.Client
) -> None:
    path = AutoPath(0, select=Choosing(LoadPath.GDS), library=kvikio)
    out = blank(device)
    path.load(ns, TOKENS, out, timeout_s=60)
    found(path)
    to_nvme(client)
    kvikio.answers.clear()
    for bound_s in longer_bounds(0.05):  # late, and no reason to give the path up
        late = path.load(ns, TOKENS, out, timeout_s=bound_s)
        if late:
            break  # it was the daemon's: the path is taken
        assert late.missed == {"timeout": PAGES}
    assert path.load(ns, TOKENS, out, timeout_s=60) == PAGES
    assert (device.read(out) == ROWS).all()
    kvikio.answers.set()
    assert path.problem == ""

    def read_so() -> bool:
        fresh = client.open(dataclasses.replace(SPACE, salt=str(time.monotonic_ns())))
        assert fresh.store(TOKENS, ROWS, timeout_s=60).stored == PAGES
        to_nvme(client)
        device.poke(device.address(out), np.zeros_like(ROWS))
        assert path.load(fresh, TOKENS, out, timeout_s=60) == PAGES
        assert (device.read(out) == ROWS).all()
        return fresh.lookup(TOKENS).by_tier["nvme"] == PAGES

    eventually(read_so, "the path is free again")
    path.close()


@pytest.mark.usefixtures("much")
def test_namespaces_and_daemons_come_and_go_and_the_stages_stay_two(
    device: ModelDevice, ns: Any, kvikio: KvikioModel, serving: Serving, client: kvw.Client
) -> None:
    path = AutoPath(0, select=Choosing(LoadPath.GDS), library=kvikio)
    out = blank(device)
    assert ns.load(TOKENS, out, timeout_s=60) == PAGES
    before = device.count("device_bytes")
    path.load(ns, TOKENS, out, timeout_s=60)
    found(path)
    for salt in ("", "a", "b"):
        opened = client.open(dataclasses.replace(SPACE, salt=salt))
        opened.store(TOKENS, ROWS, timeout_s=60)
        to_nvme(client)
        device.poke(device.address(out), np.zeros_like(ROWS))
        files = kvikio.opened
        assert path.load(opened, TOKENS, out, timeout_s=60) == PAGES
        assert opened.lookup(TOKENS).by_tier["nvme"] == PAGES
        assert kvikio.opened > files or salt
        assert (device.read(out) == ROWS).all()
    serving.kill()
    serving.start()
    assert client.refresh(60)
    opened = client.open(dataclasses.replace(SPACE, salt="c"))
    assert opened.store(TOKENS, ROWS, timeout_s=60).stored == PAGES
    to_nvme(client)
    device.poke(device.address(out), np.zeros_like(ROWS))
    assert path.load(opened, TOKENS, out, timeout_s=60) == PAGES
    assert opened.lookup(TOKENS).by_tier["nvme"] == PAGES
    assert (device.read(out) == ROWS).all()
    assert device.count("device_bytes") == before + 2 * STAGE_BYTES
    path.close()
