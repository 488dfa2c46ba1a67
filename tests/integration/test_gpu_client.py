"""Pages in the memory of a GPU, by the public client against a real daemon and the contract model
of CUDA's driver. It needs no GPU: tests/gpu runs the same suite over one.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import kvwarehouse as kvw
import kvwarehouse.aio
import kvwarehouse.gpu
from kvwarehouse.client.gpu import kernels
from kvwarehouse.client.gpu.memory import event_of, streams_of
from kvwarehouse_bench.harness.client_process import ClientProcess
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from testkit import cuda_model
from testkit.cuda_model import ModelDevice
from testkit.device_suite import PAGE_BYTES, PAGES, SPACE, DeviceSuite, noise, prompt


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("daemon"), dram="16MiB", grace_s="0.2") as serving:
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
    return client.open(SPACE)


class TestModel(DeviceSuite):
    """The suite over the model."""

    def test_model_saw_no_broken_rule(
        self, device: ModelDevice, client: kvw.Client, ns: Any
    ) -> None:
        # Of a device that failed, as another file's tests let it, a client keeps its registration.
        kept = device.count("registered_bytes")
        array = device.array(noise(1))
        assert ns.store(prompt(1), array).stored == PAGES
        assert ns.load(prompt(1), array) == PAGES
        client.close()
        assert device.count("violations") == 0
        assert device.count("unpinned_copies") == 0
        assert device.count("registered_bytes") == kept


def test_array_of_a_device_is_refused_when_its_type_order_or_rights_do_not_fit(
    device: ModelDevice, ns: Any
) -> None:
    wrong = {
        "typestr": ("<f2", "expected uint8"),
        "strides": ((2 * PAGE_BYTES, 1), "copy it first"),
        "data": ((device.array(noise(1)).address, True), "read-only"),
    }
    for field, (value, words) in wrong.items():
        array = device.array(noise(1))
        array.interface[field] = value
        with pytest.raises(kvw.UsageError, match=words):
            ns.load(prompt(1), array)


def test_single_row_of_a_device_is_refused_when_its_bytes_are_apart(
    device: ModelDevice, ns: Any
) -> None:
    # Such a row was taken for contiguous: wrong bytes were stored, and a load wrote beside the
    # page.
    tokens, data = prompt(1)[: SPACE.page_tokens], noise(1, pages=2)
    array = device.array(data)
    array.interface["shape"] = (1, PAGE_BYTES)
    array.interface["strides"] = (2 * PAGE_BYTES, 2)
    for call in (ns.store, ns.load):
        with pytest.raises(kvw.UsageError, match="copy it first") as refused:
            call(tokens, array)
        assert refused.value.code == "bad_pages"
    array.interface["strides"] = (2 * PAGE_BYTES, 1)  # a row has no next one
    assert ns.store(tokens, array).stored == 1
    assert ns.load(tokens, array) == 1
    assert (device.read(array)[0] == data[0]).all()


def test_arena_that_the_driver_does_not_register_is_told_once(
    device: ModelDevice, ns: Any, caplog: pytest.LogCaptureFixture
) -> None:
    array = device.array(noise(1))
    device.set("register_result", 801)  # CUDA_ERROR_NOT_SUPPORTED
    try:
        ns.load(prompt(1), array)
        eventually(
            lambda: ns.load(prompt(1), array) == 0 and "not registered" in caplog.text,
            "the refusal is in the log",
        )
        ns.load(prompt(1), array)
    finally:
        device.set("register_result", 0)
    assert caplog.text.count("not registered") == 1
    assert "CUDA_ERROR_NOT_SUPPORTED" in caplog.text


def test_events_are_taken_from_torch_from_cupy_and_as_addresses() -> None:
    torch_event = type("Event", (), {"cuda_event": 77})()
    cupy_event = type("Event", (), {"ptr": 78})()
    assert [event_of(each) for each in (None, 5, torch_event, cupy_event)] == [0, 5, 77, 78]
    for wrong in (0, -1, True, "event", type("Event", (), {"cuda_event": 0})()):
        with pytest.raises(kvw.UsageError, match="event"):
            event_of(wrong)


def test_kernels_without_a_compiler_are_refused_with_where_to_get_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels.compiled.cache_clear()
    monkeypatch.setenv("KVW_NVRTC", "/nonexistent/libnvrtc.so")
    with pytest.raises(kvw.UsageError, match="nvidia-cuda-nvrtc") as refused:
        kernels.compiled(9, 0)
    assert refused.value.code == "no_nvrtc"


def test_source_that_does_not_compile_is_refused_with_the_compilers_words(
    cuda_driver: Path,
) -> None:
    with pytest.raises(kvw.WarehouseError, match="no kernels"):
        kernels.compile_source(model_compiler(), b"int nothing;", "sm_90")


def model_compiler() -> Any:
    return next(kernels.compilers())


@pytest.fixture
def compiler(device: ModelDevice) -> Iterator[ModelDevice]:
    """The model's, in a process that has compiled nothing yet."""
    kernels.compiled.cache_clear()
    yield device
    kernels.compiled.cache_clear()
    device.set("compiler_newest", 90)
    device.set("refuses_ptx", 0)


def test_kernels_load_where_the_driver_is_older_than_the_compiler(
    compiler: ModelDevice, ns: Any
) -> None:
    """torch brings an NVRTC of its own, mostly newer than the driver, which refuses its PTX."""
    compiler.set("refuses_ptx", 1)
    array = compiler.array(noise(1))
    assert ns.store(prompt(1), array).stored == PAGES
    assert ns.load(prompt(1), array) == PAGES


def test_kernels_are_ptx_where_the_device_is_newer_than_the_compiler(
    compiler: ModelDevice, ns: Any
) -> None:
    compiler.set("compiler_newest", 80)
    assert kernels.architecture(model_compiler(), 9, 0) == "compute_80"
    array = compiler.array(noise(1))
    assert ns.store(prompt(1), array).stored == PAGES


def test_ptx_that_the_driver_refuses_is_an_error_with_what_to_install(
    compiler: ModelDevice, ns: Any
) -> None:
    compiler.set("compiler_newest", 80)
    compiler.set("refuses_ptx", 1)
    with pytest.raises(kvw.WarehouseError, match="update the driver"):
        ns.store(prompt(1), compiler.array(noise(1)))


def test_device_that_is_older_than_the_compiler_knows_is_refused_with_what_to_install(
    cuda_driver: Path,
) -> None:
    with pytest.raises(kvw.UsageError, match=r"7.5 and later, and this one has 7.0") as refused:
        kernels.architecture(model_compiler(), 7, 0)
    assert refused.value.code == "no_nvrtc"


@pytest.mark.parametrize(
    ("driver_major", "majors"),
    [(13, [13, 12, 11]), (12, [12, 11, 13]), (11, [11, 13, 12]), (0, [13, 12, 11])],
)
def test_compiler_of_the_drivers_version_is_asked_for_first(
    driver_major: int, majors: list[int]
) -> None:
    names = kernels.preferred(driver_major)
    assert [int(name.removeprefix("libnvrtc.so.").partition(".")[0]) for name in names] == majors


def test_prepared_device_has_its_kernels_before_the_first_pages_move(
    device: ModelDevice, client: kvw.Client, ns: Any
) -> None:
    """Loading them waits for what the device has queued: an engine's step, in its midst."""
    array = device.array(noise(1))
    before = device.count("modules")
    assert kvw.gpu.prepare(array.address, client) == 0
    assert device.count("modules") == before + 1
    assert ns.store(prompt(1), array).stored == PAGES
    assert device.count("modules") == before + 1


# --- a client that nobody closes


def test_what_a_framework_does_aside_breaks_no_captured_graph(device: ModelDevice) -> None:
    event = device.record()
    eventually(lambda: device.happened(event), "the event")
    broken = device.count("broken_captures")
    device.set("capture", 1)
    try:
        with kvwarehouse.gpu.relaxed_capture_mode():
            assert device.happened(event)
        assert device.count("broken_captures") == broken
        with pytest.raises(AssertionError, match="answers 900"):
            device.happened(event)
        assert device.count("broken_captures") == broken + 1
    finally:
        device.set("capture", 0)


def test_thread_is_not_left_aside_where_no_device_has_the_address(device: ModelDevice) -> None:
    event = device.record()
    eventually(lambda: device.happened(event), "the event")
    aside = kvwarehouse.gpu.relaxed_capture_mode(4096)
    with pytest.raises(kvw.UsageError) as refused, aside:
        pass
    assert refused.value.code == "bad_device_memory"
    device.set("capture", 1)
    try:
        with pytest.raises(AssertionError, match="answers 900"):
            device.happened(event)
    finally:
        device.set("capture", 0)


def test_nothing_is_aside_where_there_is_no_driver() -> None:
    asks = "import kvwarehouse.gpu\nwith kvwarehouse.gpu.relaxed_capture_mode(): print('here')"
    environment = os.environ | {"KVW_CUDA_DRIVER": "/nonexistent/libcuda.so"}
    done = subprocess.run(
        [sys.executable, "-c", asks], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "here\n"


# What is registered before the client's own is called after it.
FORGETFUL = """
os.environ.update(given["environment"])
import atexit, time
from pathlib import Path
from testkit.cuda_model import ModelDevice
from testkit.device_suite import SPACE, noise, prompt
device = ModelDevice(Path(given["folder"]))
def ended():
    asked = device.count("registers_asked")
    time.sleep(0.3)
    say([asked, device.count("registers_asked"), device.count("unregisters_asked")])
atexit.register(ended)
device.set("register_result", 900)  # so that registering goes on for ever
client.open(SPACE).store(prompt(1), device.array(noise(1)))
while device.count("registers_asked") < 2: pass
say("registering")
"""


def test_client_that_nobody_closes_registers_nothing_more_when_the_process_ends(
    cuda_driver: Path, serving: Serving
) -> None:
    """The driver ends with the process, and its registration went on beside that."""
    environment = cuda_model.environment(cuda_driver)
    process = ClientProcess(
        serving.address, FORGETFUL, folder=str(cuda_driver), environment=environment
    )
    assert process.hear() == "registering"
    before, after, undone = process.hear()
    assert before == after
    assert undone == 0


def test_client_that_nobody_closes_undoes_its_registration_beside_python(
    device: ModelDevice, serving: Serving
) -> None:
    before = device.count("registered_bytes")
    client = serving.connect(timeout_s=60)
    client.open(SPACE).store(prompt(1), device.array(noise(1)))
    eventually(lambda: device.count("registered_bytes") > before, "the arena registered")
    asked = device.count("unregisters_asked")
    device.set("hold_unregister", 1)
    last = [client]
    del client
    ending = threading.Thread(target=last.clear)
    ending.start()
    # Or this thread never runs again.
    eventually(lambda: device.count("unregisters_asked") > asked, "the arena let go of")
    assert ending.is_alive()
    device.set("hold_unregister", 0)
    ending.join()


def test_clients_that_hang_share_the_time_that_the_process_waits_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvwarehouse.client.gpu import at_exit

    class Stuck:
        given: float | None = None

        def stop_registering(self, timeout_s: float) -> None:
            nonlocal now_s
            self.given = timeout_s
            now_s += timeout_s
            raise RuntimeError("still at it")

    now_s = 100.0
    monkeypatch.setattr(at_exit, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(at_exit, "_open", set())
    stuck = [Stuck(), Stuck()]
    for each in stuck:
        at_exit.stop_at_exit(each)
    at_exit._stop_all()
    given = sorted(each.given for each in stuck if each.given is not None)
    assert given == [0.0, at_exit._STOP_S]


# --- streams of arrays


@pytest.fixture
def held(device: ModelDevice) -> Iterator[ModelDevice]:
    """No stream begins anything."""
    device.set("hold", 1)
    yield device
    device.set("hold", 0)
    eventually(lambda: device.count("busy_streams") == 0, "nothing is under way")


@pytest.mark.parametrize("stream", ModelDevice.streams)
def test_nothing_is_copied_while_the_stream_of_an_array_has_work(
    device: ModelDevice, ns: Any, held: ModelDevice, stream: str
) -> None:
    data = noise(1)
    assert ns.store(prompt(1), data).stored == PAGES
    array = device.array(data)
    with device.current(stream):
        device.queue_fill(array, noise(2), stream)
        copies, launches = device.count("copies"), device.count("launches")
        stored = ns.store(prompt(2), array, timeout_s=0.1)
        assert (stored.stored, stored.dropped["timeout"]) == (0, 1)
        loaded = ns.load(prompt(1), array, timeout_s=0.1)
        assert (loaded, loaded.missed) == (0, {"timeout": PAGES})
    assert (device.count("copies"), device.count("launches")) == (copies, launches)


def test_event_that_is_given_is_waited_for_in_place_of_the_stream(
    device: ModelDevice, ns: Any
) -> None:
    """Whoever gives one knows better: what is queued behind it may be another request's."""
    data = noise(1)
    array = device.array(data)
    early = device.record()
    eventually(lambda: device.happened(early), "the event")
    recorded = device.count("events")
    with device.current("engine"):
        device.queue_fill(array, noise(2))
        regions = kvw.Regions.rows(array, writable=False).on_device(after=early)
        assert regions.behind_streams() is regions
    assert device.count("events") == recorded


def test_events_that_calls_record_end_with_them(device: ModelDevice, ns: Any) -> None:
    array = device.array(noise(1))
    assert ns.store(prompt(1), array).stored == PAGES
    events, contexts = device.count("events"), device.count("contexts")
    with device.current("engine"):
        for _ in range(3):
            assert ns.load(prompt(1), array) == PAGES
    assert (device.count("events"), device.count("contexts")) == (events, contexts)


def test_stream_is_recorded_beside_a_capture_without_breaking_it(
    device: ModelDevice, ns: Any
) -> None:
    array = device.array(noise(1))
    assert ns.store(prompt(1), array).stored == PAGES
    broken = device.count("broken_captures")
    device.set("capture", 1)
    try:
        with device.current("engine"):
            assert ns.load(prompt(1), array) == PAGES
    finally:
        device.set("capture", 0)
    assert device.count("broken_captures") == broken


@pytest.mark.parametrize("stream", ["engine", "default"])
def test_array_on_a_stream_that_is_captured_is_refused_and_the_graph_stays_whole(
    device: ModelDevice, ns: Any, stream: str
) -> None:
    """Whoever records on it, or looks at an event of it, breaks the graph."""
    array = device.array(noise(1))
    assert ns.store(prompt(1), array).stored == PAGES
    broken, events = device.count("broken_captures"), device.count("events")
    with device.current(stream):
        with device.captured(stream):
            for call in (ns.load, ns.store):
                with pytest.raises(kvw.CapacityError, match="captures a CUDA graph") as refused:
                    call(prompt(1), array)
                assert refused.value.code == "gpu_capture"
        assert (device.count("broken_captures"), device.count("events")) == (broken, events)
        assert ns.load(prompt(1), array) == PAGES


@pytest.mark.parametrize("stream", [0, -1, True, "1", 1.0])
def test_what_can_be_no_stream_is_refused_with_what_can(
    device: ModelDevice, ns: Any, stream: Any
) -> None:
    array = device.array(noise(1))
    array.interface["stream"] = stream
    with pytest.raises(kvw.UsageError, match="it may be 1") as refused:
        ns.store(prompt(1), array)
    assert refused.value.code == "bad_stream"


def test_stream_of_another_device_is_refused_with_what_to_do(device: ModelDevice, ns: Any) -> None:
    array = device.array(noise(1))
    array.interface["stream"] = device.stream_of_another()
    events = device.count("events")
    with pytest.raises(kvw.UsageError, match="not one of device 0") as refused:
        ns.load(prompt(1), array)
    assert refused.value.code == "bad_stream"
    assert device.count("events") == events


def test_streams_of_a_thread_are_those_of_the_caller_of_an_asynchronous_call(
    device: ModelDevice, serving: Serving
) -> None:
    """The call itself is made in another thread, whose own stream has nothing to do."""

    async def store() -> Any:
        async with await kvw.aio.connect(serving.address) as client:
            ns = await client.open(SPACE)
            with device.current("thread's"):
                device.queue_fill(array, data, "thread's")
                return await ns.store(prompt(1), array, timeout_s=60)

    data = noise(1)
    array = device.array(np.zeros_like(data))
    assert asyncio.run(store()).stored == PAGES
    on_host = np.zeros_like(data)
    with serving.connect() as client:
        assert client.open(SPACE).load(prompt(1), on_host) == PAGES
    assert (on_host == data).all()


def test_tensors_of_torch_are_behind_its_current_stream_of_their_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They name no stream themselves: version 2 of the interface."""

    class Tensor:
        __cuda_array_interface__: ClassVar[Any] = {"version": 2}

        def __init__(self, device: str) -> None:
            self.device, self.is_cuda = device, device != "cpu"

    handles = {"cuda:0": 0, "cuda:1": 4096}
    cuda = SimpleNamespace(current_stream=lambda d: SimpleNamespace(cuda_stream=handles[d]))
    array = SimpleNamespace(__cuda_array_interface__={"version": 3, "stream": 8192})
    tensors = [Tensor(each) for each in ("cuda:0", "cpu", "cuda:1", "cuda:0")]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, cuda=cuda))
    assert streams_of([*tensors, array, noise(1), None]) == [1, 4096, 8192]
    monkeypatch.delitem(sys.modules, "torch")
    assert streams_of([array, noise(1)]) == [8192]
    assert "torch" not in sys.modules


def test_gather_takes_streams_as_torch_numbers_them(
    device: ModelDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []
    gather = kvw.gpu.DeviceGather(0)
    native = SimpleNamespace(launch=lambda plan, tables, stream: launched.append(stream))
    monkeypatch.setattr(gather, "_native", native)
    plan: Any = None
    for stream in (0, 1, 4096):
        gather.launch(plan, 8, stream)
    assert launched == [1, 1, 4096]


# --- a client that dies while the device is at work

# Holds the device, then stores or loads; says so before it does.
VICTIM = """
os.environ.update(given["environment"])
from pathlib import Path
from testkit.cuda_model import ModelDevice
from testkit.device_suite import SPACE, noise, prompt
device = ModelDevice(Path(given["folder"]))
array = device.array(noise(1))
ns = client.open(SPACE)
device.set("hold", 1)
say("ready")
getattr(ns, given["call"])(prompt(1), array)
"""


def victim(serving: Serving, model: Path, call: str) -> ClientProcess:
    process = ClientProcess(
        serving.address,
        VICTIM,
        call=call,
        folder=str(model),
        environment=cuda_model.environment(model),
    )
    assert process.hear() == "ready"
    return process


def core(client: kvw.Client) -> Any:
    return client.status()["core"]


def dram(client: kvw.Client) -> Any:
    return core(client)["tiers"]["dram"]


def unfinished(client: kvw.Client) -> int:
    """Slots that somebody may still write to."""
    found = dram(client)
    return int(found["reserved_slots"] + found["limbo_slots"])


def fill(client: kvw.Client, first: int) -> None:
    """More prompts than the arena has room for."""
    ns = client.open(SPACE)
    for number in range(first, first + 300):
        ns.store(prompt(number), noise(number), timeout_s=60)


@pytest.mark.timeout(240)
def test_slots_that_a_killed_clients_device_may_write_to_are_nobodys_until_the_grace_is_over(
    cuda_driver: Path, tmp_path: Path
) -> None:
    with (
        Serving(tmp_path, dram="16MiB", limbo_after_s="0.2", grace_s="3600") as serving,
        serving.connect(timeout_s=60) as client,
        victim(serving, cuda_driver, "store") as process,
    ):
        # Of a page that is not finished in time they are in limbo, whoever lives.
        eventually(lambda: unfinished(client) == PAGES, "the device has slots to write to")
        process.kill()
        eventually(lambda: dram(client)["limbo_slots"] == PAGES, "they are in limbo")
        fill(client, 1000)
        # Slots that this client had for too long may be there, for a moment.
        eventually(lambda: dram(client)["limbo_slots"] == PAGES, "they are still nobody's")


@pytest.mark.timeout(240)
def test_slots_of_a_killed_clients_device_come_back_after_the_grace(
    cuda_driver: Path, serving: Serving, client: kvw.Client, ns: Any
) -> None:
    with victim(serving, cuda_driver, "store") as process:
        eventually(lambda: unfinished(client) == PAGES, "the device has slots to write to")
        process.kill()
    eventually(lambda: unfinished(client) == 0, "they are free")
    assert ns.store(prompt(1), noise(1), timeout_s=60).stored == PAGES


@pytest.mark.timeout(240)
def test_pages_that_a_killed_clients_device_may_read_stay_until_the_grace_is_over(
    cuda_driver: Path, tmp_path: Path
) -> None:
    with (
        Serving(tmp_path, dram="16MiB", grace_s="3600") as serving,
        serving.connect(timeout_s=60) as client,
    ):
        ns = client.open(SPACE)
        assert ns.store(prompt(1), noise(1)).stored == PAGES
        with victim(serving, cuda_driver, "load") as process:
            eventually(
                lambda: core(client)["pins"]["held"] == PAGES, "the device has pages to read"
            )
            process.kill()
        fill(client, 1000)
        out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
        assert ns.load(prompt(1), out) == PAGES
        assert (out == noise(1)).all()
