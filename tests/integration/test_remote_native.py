"""What a worker of the remote tier does with the native core: pages of a served arena become
objects that a reader of the store accepts, from the run that the daemon offers to its place in the
filter, and objects become pages of another host."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvwarehouse.core import (
    GET_ENDS,
    SECRET_BYTES,
    Core,
    CoreOptions,
    NativeClient,
    PackedRun,
    PresenceFile,
    Regions,
    RemoteGetLink,
    RemoteLink,
    RunToGet,
    RunToPut,
    chain_keys,
    check_object,
)
from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.object_store import StoreSettings, open_store
from kvwarehouse.remote.report import EpochsFound, EpochsHeard, WorkerSettings, read_line
from kvwarehouse_bench.harness.eventually import eventually

FLEET, SPACE = bytes(range(16)), bytes(range(16, 32))
SECRET = bytes(i % 251 for i in range(SECRET_BYTES))
TOKENS, SHARDS, SHARD_BYTES = 64, 2, 6000  # so runs of 4 pages
SHAPE = (TOKENS, SHARDS, SHARD_BYTES)
RUN = 4
TODAY = 20785
LONG_S = 60.0


@dataclass
class Tier:
    core: Core
    client: NativeClient
    filter: PresenceFile
    link: RemoteLink
    tokens: NDArray[np.uint32]

    def store(self, pages: int) -> None:
        rows = np.random.default_rng(5).integers(
            0, 256, (SHARDS, pages, SHARD_BYTES), dtype=np.uint8
        )
        for page in range(pages):  # one is unfinished until it has all its shards
            for shard in range(SHARDS):
                regions = Regions.pages(rows[shard, page : page + 1], False)
                report = self.client.store(SPACE, self.tokens, None, page, regions, shard, LONG_S)
                assert report[2] == {}

    def next(self) -> RunToPut:
        run = self.link.next(LONG_S)
        assert run is not None
        return run

    def key(self, page: int) -> bytes:
        return bytes(chain_keys(SECRET, SPACE, self.tokens, TOKENS)[page])

    def loaded(self, client: NativeClient, shard: int) -> NDArray[np.uint8]:
        """All pages."""
        rows = np.zeros((2 * RUN, SHARD_BYTES), np.uint8)
        regions = Regions.pages(rows, True)
        assert client.load(SPACE, self.tokens, None, 0, regions, shard, LONG_S) == (2 * RUN, {})
        return rows

    def pack(self, run: RunToPut) -> PackedRun:
        return self.client.pack_run(run, FLEET)


def checked(
    data: bytes | memoryview | PackedRun, run: RunToPut, fleet: bytes = FLEET
) -> tuple[str, int, int]:
    return check_object(fleet, SECRET, run.namespace_id, run.epoch, run.key, data)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier")  # a short name: a socket's path is bounded


@contextlib.contextmanager
def running(folder: Path, read: bool = False) -> Iterator[tuple[Core, NativeClient]]:
    options = CoreOptions()
    options.socket_path = str(folder / "kvw.sock")
    options.arena_dir = str(folder / "arena")
    options.dram_bytes = 16 << 20
    options.warehouse_id = bytes(16)
    options.secret = SECRET
    options.remote_write = "all"
    options.remote_fleet = FLEET
    options.remote_read = read
    core = Core(options)
    core.add_namespace(0, SPACE, *SHAPE, 0)
    assert core.set_remote_epoch(SPACE, 0, 0)
    core.start()
    try:
        yield core, NativeClient(options.socket_path, True, LONG_S)
    finally:
        core.stop()


@pytest.fixture
def tier(folder: Path) -> Iterator[Tier]:
    with running(folder) as (core, client):
        filter_ = PresenceFile(str(folder / "arena" / "presence"), FLEET, 1000, 7, TODAY)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        core.attach_remote(theirs.detach())
        tokens = np.random.default_rng(1).integers(0, 50000, TOKENS * 2 * RUN, dtype=np.uint32)
        yield Tier(core, client, filter_, RemoteLink(ours.detach()), tokens)


def test_run_that_is_stored_becomes_an_object_that_a_reader_accepts(tier: Tier) -> None:
    tier.link.ready(2)
    tier.store(2 * RUN)
    for number in range(2):
        run = tier.next()
        assert (run.namespace_id, run.key) == (SPACE, tier.key(RUN * (number + 1) - 1))
        assert (run.first_position, run.pages, run.epoch, run.day) == (RUN * number, RUN, 0, None)
        packed = tier.pack(run)
        assert packed.reason == ""
        whole = memoryview(packed)
        assert (whole.nbytes, whole.readonly) == (run.bytes, True)
        assert checked(packed, run) == ("", RUN, run.record_bytes)
        damaged = bytearray(whole)
        damaged[-5000] ^= 1  # of the last page's last shard
        assert checked(bytes(damaged), run)[:2] == ("digest", RUN - 1)
        assert checked(packed, run, fleet=bytes(16))[:2] == ("place", 0)
        assert checked(whole[:-4096], run)[0] == "size"
        tier.link.done(run)
    status = tier.core.status()["remote_puts"]
    assert (status["offered_runs"], status["queued_runs"]) == (2, 0)


def test_object_outlives_what_made_it_while_somebody_looks_at_it(tier: Tier) -> None:
    tier.link.ready(1)
    tier.store(RUN)
    run = tier.next()
    view = memoryview(tier.pack(run))
    tier.client.close()
    assert checked(view, run)[0] == ""


def test_what_makes_no_object_says_why_and_is_no_buffer(tier: Tier) -> None:
    tier.link.ready(1)
    tier.store(RUN)
    run = tier.next()
    tier.core.clear([0], 1)
    packed = tier.pack(run)
    assert packed.reason == "not_in_dram"
    with pytest.raises(BufferError, match="not_in_dram"):
        memoryview(packed)
    foreign = RunToPut(bytes(16), run.key, 0, RUN, 0, None, run.record_bytes)
    assert tier.pack(foreign).reason == "unknown_namespace"


def test_run_that_the_filter_has_is_not_offered_again(tier: Tier) -> None:
    tier.link.ready(1)
    tier.store(RUN)
    run = tier.next()
    tier.filter.put(run.key, np.zeros(1, np.uint64), np.full(1, TODAY - 1, np.uint32))
    tier.link.done(run)
    rows = np.zeros((RUN, SHARD_BYTES), np.uint8)
    loaded, _ = tier.client.load(
        SPACE, tier.tokens[: TOKENS * RUN], None, 0, Regions.pages(rows, True), 0, LONG_S
    )
    assert loaded == RUN
    again = tier.next()
    assert (again.key, again.day) == (run.key, TODAY - 1)
    assert tier.core.status()["remote_puts"]["refresh_runs"] == 1


def test_thread_that_waits_for_a_run_leaves_others_at_work(tier: Tier) -> None:
    tier.link.ready(1)
    got: list[str] = []

    def wait() -> None:
        try:
            tier.link.next(LONG_S)
        except TransportError as error:
            got.append(error.code)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert tier.link.next(0.0) is None
    tier.link.close()
    waiting.join(LONG_S)
    assert got == ["link_closed"]


def test_wrong_descriptors_and_settings_are_refused(tier: Tier, folder: Path) -> None:
    pair = socket.socketpair()
    with pytest.raises(UsageError, match="SOCK_SEQPACKET"):
        tier.core.attach_remote(pair[0].detach())
    with pytest.raises(UsageError, match="SOCK_SEQPACKET"):
        RemoteLink(pair[1].detach())
    options = CoreOptions()
    options.remote_write = "some"
    with pytest.raises(UsageError, match="remote_write is 'some'"):
        Core(options)


# native/remote/link.h and get_link.h, as the core says and hears it.
HEAD = struct.Struct("<IHH")
GET = struct.Struct("<Q16s16sQQQQIIIIII")
GOT = struct.Struct("<QII")
MAGIC, VERSION, GETS, STATE, GET_TYPE, GOT_TYPE = 0x4C57564B, 1, 4, 5, 6, 7


@pytest.fixture
def gets() -> Iterator[tuple[RemoteGetLink, socket.socket]]:
    """A worker's end, and the core's, which is played here."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = RemoteGetLink(ours.detach())
    with theirs:
        theirs.settimeout(LONG_S)
        yield link, theirs
    link.close()


def message_for_get(key: bytes, witness_kind: int = 1) -> bytes:
    head = HEAD.pack(MAGIC, VERSION, GET_TYPE)
    return head + GET.pack(
        9, SPACE, key, 3, 2, 8192, 1_500_000_000, 12, RUN, 1, TODAY, witness_kind, 0
    )


def heard(core: socket.socket) -> tuple[int, bytes]:
    message = core.recv(256)
    magic, version, kind = HEAD.unpack(message[: HEAD.size])
    assert (magic, version) == (MAGIC, VERSION)
    return kind, message[HEAD.size :]


def test_worker_hears_of_a_run_to_get_as_the_core_says_it(
    gets: tuple[RemoteGetLink, socket.socket],
) -> None:
    link, core = gets
    assert link.next(0.0) is None
    core.send(message_for_get(b"k" * 16))
    run = link.next(LONG_S)
    assert run is not None
    assert (run.namespace_id, run.key, run.epoch, run.clear_epoch) == (SPACE, b"k" * 16, 3, 2)
    assert (run.first_position, run.pages, run.from_page, run.day) == (12, RUN, 1, TODAY)
    assert (run.record_bytes, run.begin, run.end) == (8192, 8192, RUN * 8192)
    assert (run.within_s, run.engine_keys) == (1.5, False)
    core.send(message_for_get(b"e" * 16, witness_kind=2))
    keyed = link.next(LONG_S)
    assert keyed is not None
    assert keyed.engine_keys


def test_core_hears_how_each_get_of_a_worker_ends(
    gets: tuple[RemoteGetLink, socket.socket],
) -> None:
    link, core = gets
    link.ready(8)
    link.state(5, 10, 20)
    assert heard(core) == (GETS, struct.pack("<II", 8, 0))
    assert heard(core) == (STATE, struct.pack("<QQQ", 5, 10, 20))
    core.send(message_for_get(b"k" * 16))
    run = link.next(LONG_S)
    assert run is not None
    assert GET_ENDS == ("filled", "missing", "damaged", "failed", "late", "no_room", "cleared")
    for number, end in enumerate(GET_ENDS):
        link.done(run, end, number)
        assert heard(core) == (GOT_TYPE, GOT.pack(9, number, number))
    with pytest.raises(UsageError, match="does not end as 'lost'"):
        link.done(run, "lost", 0)
    for wrong in (0, 65):
        with pytest.raises(UsageError, match="1 to 64"):
            link.ready(wrong)
    core.close()
    with pytest.raises(TransportError) as caught:
        link.next(LONG_S)
    assert caught.value.code == "link_closed"


def test_run_to_get_is_what_it_was_made_of() -> None:
    run = RunToGet(
        namespace_id=SPACE,
        key=b"k" * 16,
        epoch=3,
        clear_epoch=2,
        record_bytes=4096,
        within_s=0.25,
        first_position=4,
        pages=RUN,
        from_page=2,
        day=TODAY,
        engine_keys=True,
    )
    assert (run.begin, run.end, run.within_s, run.engine_keys) == (8192, 16384, 0.25, True)


def test_runs_are_put_under_the_epoch_of_their_namespace_and_none_without(tier: Tier) -> None:
    tier.link.ready(2)
    tier.core.stop_remote(SPACE)
    tier.core.stop_remote(bytes(16))  # nobody
    tier.store(RUN)
    assert tier.core.status()["remote_puts"]["queued_runs"] == 1  # until there is one
    tier.core.clear([0], 6)
    assert not tier.core.set_remote_epoch(SPACE, 7, 5)
    assert not tier.core.set_remote_epoch(bytes(16), 7, 6)
    assert tier.core.set_remote_epoch(SPACE, 7, 6)
    tier.store(RUN)
    assert tier.next().epoch == 7


def test_core_that_reads_nothing_takes_a_link_for_gets_and_serves_nothing(tier: Tier) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tier.core.attach_remote_gets(theirs.detach())
    link = RemoteGetLink(ours.detach())
    link.ready(1)
    link.state(1 << 62, 1, 1)
    assert link.next(0.0) is None
    assert tier.core.status()["remote_fetches"] == {
        "asked": 0,
        "joined": 0,
        "later": 0,
        "queued": 0,
        "under_way": 0,
        "under_way_bytes": 0,
        "ends": dict.fromkeys(GET_ENDS, 0),
    }


def wanted(run: RunToPut, **changes: object) -> RunToGet:
    fields: dict[str, Any] = {
        "namespace_id": run.namespace_id, "key": run.key, "epoch": run.epoch, "clear_epoch": 0,
        "record_bytes": run.record_bytes, "within_s": LONG_S,
        "first_position": run.first_position, "pages": run.pages, "from_page": 0, "day": TODAY,
        "engine_keys": False,
    }  # fmt: skip
    return RunToGet(**{**fields, **changes})


def test_objects_of_one_host_become_pages_of_another(
    tier: Tier, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tier.link.ready(2)
    tier.store(2 * RUN)
    runs = [tier.next(), tier.next()]
    objects = [memoryview(tier.pack(run)) for run in runs]
    with running(tmp_path_factory.mktemp("other")) as (_, other):
        early = other.fill_run(wanted(runs[1]), objects[1], FLEET, LONG_S)
        assert (early.end, early.pages, early.fault) == ("no_room", 0, "parent_missing")
        assert early.parent == runs[0].key
        damaged = bytearray(objects[0])
        damaged[-5000] ^= 1  # of the last page's last shard
        half = other.fill_run(wanted(runs[0]), memoryview(damaged), FLEET, LONG_S)
        assert (half.end, half.pages, half.fault) == ("damaged", RUN - 1, "digest")
        rest = wanted(runs[0], from_page=RUN - 1)
        filled = other.fill_run(rest, objects[0][rest.begin : rest.end], FLEET, LONG_S)
        assert (filled.end, filled.pages, filled.fault) == ("filled", 1, "")
        assert other.fill_run(wanted(runs[1]), objects[1], FLEET, LONG_S).end == "filled"
        assert sum(other.lookup(SPACE, tier.tokens, None)) == 2 * RUN
        for shard in range(SHAPE[1]):
            assert (tier.loaded(tier.client, shard) == tier.loaded(other, shard)).all()


@contextlib.contextmanager
def worker(core: Core, folder: Path, store: Path) -> Iterator[None]:
    """The real one, of the store in that folder."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    core.attach_remote(pairs[0][0].detach())
    core.attach_remote_gets(pairs[1][0].detach())
    link_fd, get_link_fd = (its.fileno() for _, its in pairs)
    settings = WorkerSettings(
        link_fd=link_fd, get_link_fd=get_link_fd, socket=str(folder / "kvw.sock"),
        presence_path=str(folder / "arena" / "presence"), fleet_id=FLEET.hex(), node=7,
        url=f"file://{store}", endpoint="", region="", ca_file="", connect_s=1.0,
        get_deadline_s=LONG_S, put_deadline_s=LONG_S, puts=1, gets=8, read=True,
        write_bytes_per_s=0, write="none", capacity_bytes=1 << 30, ttl_days=3, objects=1000,
    )  # fmt: skip
    command = [sys.executable, "-P", "-m", "kvwarehouse.remote.worker"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=settings.links
    ) as process:
        for _, its in pairs:
            its.close()
        told, said = process.stdin, process.stdout
        assert told is not None
        assert said is not None
        told.write(settings.to_line())
        told.flush()

        def listen() -> None:
            """As a daemon that acts upon what it hears of clears."""
            for line in map(read_line, said):
                if isinstance(line, EpochsFound):
                    with contextlib.suppress(OSError):  # it may be killed by now
                        told.write(EpochsHeard(line.serial).to_line())
                        told.flush()

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            yield
        finally:
            process.kill()
            listener.join()


class Asking:
    """A client's socket, for `fetch` alone (native/exchange/messages.h)."""

    _HEAD = struct.Struct("<IHHQIIII")
    _HELLO, _WELCOME, _FETCH, _FETCHING = 1, 2, 18, 19
    READING, MISSING = 0, 3

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(str(folder / "kvw.sock"))
        self._number = 0
        self._ask(self._HELLO, 0, struct.pack("<QQ", 0, os.getpid()), self._WELCOME)

    def fetch(self, *runs: RunToGet) -> list[int]:
        tokens = 1  # of native/base/types.h, WitnessKind
        body = SPACE + struct.pack("<II", tokens, 0)
        for run in runs:
            within_ns = round(run.within_s * 1e9)
            run_bytes = (run.day, run.first_position, run.pages, run.from_page, within_ns)
            body += run.key + struct.pack("<IIIIQ", *run_bytes)
        reply = self._ask(self._FETCH, len(runs), body, self._FETCHING)
        return list(struct.unpack_from(f"<{len(runs)}I", reply))

    def _ask(self, kind: int, first: int, body: bytes, expected: int) -> bytes:
        self._number += 1
        size_bytes = self._HEAD.size + len(body)
        head = self._HEAD.pack(0x3157564B, 1, kind, self._number, size_bytes, first, 0, 0)
        self._socket.send(head + body)
        reply = self._socket.recv(1 << 17)
        assert self._HEAD.unpack_from(reply)[2] == expected
        return reply[self._HEAD.size :]


def test_worker_reads_back_what_another_host_has_put(
    tier: Tier, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tier.link.ready(2)
    tier.store(2 * RUN)
    runs = [tier.next(), tier.next()]
    shared, other = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("other")
    store, names = open_store(StoreSettings(f"file://{shared}")), FleetNames(FLEET)
    today = int(time.time()) // 86400
    for run in runs:
        store.put(names.pages(PagesName(SPACE, 0, today, run.key)), memoryview(tier.pack(run)))
    with running(other, read=True) as (core, client), worker(core, other, shared):
        eventually(lambda: client.control()["remote_serving"] == 1, "the store is served")
        asking = Asking(other)
        asked = [wanted(run, day=today) for run in reversed(runs)]
        assert asking.fetch(*asked) == [Asking.READING] * 2
        eventually(lambda: sum(client.lookup(SPACE, tier.tokens, None)) == 2 * RUN, "all is here")
        for shard in range(SHARDS):
            assert (tier.loaded(tier.client, shard) == tier.loaded(client, shard)).all()
        absent = wanted(runs[0], day=today, key=bytes(16))
        eventually(lambda: asking.fetch(absent) == [Asking.MISSING], "it is said to be missing")

        def ends() -> dict[str, int]:
            found = core.status()["remote_fetches"]["ends"]
            return {end: count for end, count in found.items() if count}

        # Pages are here before the worker has said of their run that it ended.
        eventually(lambda: ends().get("filled") == 2, "both have ended")
        assert ends().keys() == {"filled", "missing"}
