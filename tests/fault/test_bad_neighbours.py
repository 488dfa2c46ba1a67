"""Two clients of which one is frozen in the middle of its calls, or does its worst in another way,
each that kvwarehouse_bench/strain/neighbours.py knows. The other goes on, by shared memory and over
gRPC: its calls end, what it stores is there, and it gets at least half of the reserve that it had
alone. Nothing wrong is served, also when the frozen one wakes up. How much of its rate it keeps is
measured by `bench neighbours`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.client_process import ClientProcess
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_bench.micro.neighbours import WORST, Neighbour
from kvwarehouse_bench.strain import neighbours
from kvwarehouse_bench.strain.raw_protocols import RawSession
from testkit import tally

T = TypeVar("T")

LONG = tally.rounds(1) > 1  # `make faults`
TRIALS = tally.rounds(2) if LONG else 1
pytestmark = pytest.mark.timeout(900 if LONG else 240)

SIZES = {
    "dram": "32MiB",
    "nvme_capacity": "64MiB",
    "nvme_segment": "4MiB",
    "grace_s": "0.1",
    "limbo_after_s": "1",
}
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=120_000
)
RANKS = kvw.Namespace(
    model="ranks", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=60_000,
    shards=2,
)  # fmt: skip
OTHERS = kvw.Namespace(**{**SPACE.to_fields(), "salt": "of the bad one"})
SLOT_BYTES = 2 * 61_440  # of a page of RANKS
HOLDERS = ("never seals what it was granted", "is stopped with its share")
FILLS = "sends all it can"
TOKEN = "0123456789abcdef0123456789abcdef"
PROMPT = 8
# Of a page that is not finished within --limbo-after-s, and of one behind it.
GIVEN_UP = {"stale", "parent_missing"}
CALL_S = 10.0
HANGS_S = 45.0  # far beyond CALL_S, even on a machine with much else to do

# Stores and loads by three threads, until it hears something.
FREEZER = """
import random, select, threading
from kvwarehouse_bench.harness.pages import check_pages
space = kvw.Namespace(**given["space"])
failures, stop = [], threading.Event()
def work(seed):
    rng, ns = random.Random(seed), client.open(space)
    while not stop.is_set() and not failures:
        nodes = [rng.randrange(40) << 8 | place for place in range(given["prompt"])]
        out = np.zeros((len(nodes), space.page_bytes), np.uint8)
        try:
            if rng.random() < 0.6:
                ns.store(nodes, pages_of(nodes, 0, 0, space.page_bytes), timeout_s=30)
            else:
                loaded = ns.load(nodes, out, timeout_s=30)
                check_pages(out[:loaded], nodes[:loaded], 0, 0)
        except kvw.TransportError:
            pass  # it stood still for longer than it waits
        except BaseException as error:
            failures.append(repr(error))
threads = [threading.Thread(target=work, args=(given["seed"] + n,)) for n in range(3)]
for thread in threads:
    thread.start()
say("ready")
hear()
stop.set()
for thread in threads:
    thread.join()
say(failures)
"""

# Says hello as if it were each of the others.
HIJACK = """
import socket, struct
from kvwarehouse_bench.micro.socket_session import MESSAGE_BYTES, message
taken = []
for session in given["sessions"]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.settimeout(60)
        raw.connect(given["socket"])
        raw.send(message(1, struct.pack("<QQ", session, 1)))
        said, held, _, _ = socket.recv_fds(raw, MESSAGE_BYTES, 5)
        for fd in held:
            os.close(fd)
        taken.append([struct.unpack_from("<Q", said, 32)[0], len(said)])
say(taken)
"""

# Takes what it can get in each of many sessions, and ends none of it.
HOARDER = """
import contextlib, random
from kvwarehouse_bench.strain.raw_protocols import RawSession
space, rng = kvw.Namespace(**given["space"]), random.Random(given["seed"])
client.open(space)
with contextlib.ExitStack() as held:
    for _ in range(30):
        session = held.enter_context(RawSession(given["socket"]))
        while session.reserve(space.id, [rng.randbytes(16) for _ in range(given["prompt"])]):
            pass
    say("ready")
    hear()
"""


class Good:
    """The other client: each of its calls is timed."""

    def __init__(self, serving: Serving) -> None:
        self.client = serving.connect(timeout_s=CALL_S)
        listen = serving.events("ready")[0]["listen"]
        self.remote = kvw.connect(listen, token=TOKEN, timeout_s=CALL_S).open(SPACE)
        self.ns, self.ranks = self.client.open(SPACE), self.client.open(RANKS)
        self.next = 1 << 20
        self.alone = self.client.control().reserve_limit_bytes // 2 // SLOT_BYTES
        assert self.take_reserve(self.alone) == self.alone

    def call(self, ask: Callable[[], T]) -> T:
        begun_s = time.monotonic()
        try:
            return ask()
        finally:
            assert time.monotonic() - begun_s < HANGS_S, "a call hangs"

    def new_nodes(self, pages: int) -> list[int]:
        self.next += pages
        return list(range(self.next - pages, self.next))

    def take_reserve(self, pages: int) -> int:
        """How many pages it may have unfinished at a time, of so many; they are finished then."""

        def taken() -> list[int]:
            nodes = self.new_nodes(pages)
            each = [self.store_shard(nodes, shard) for shard in range(2)]
            return [] if None in each else each

        stored = eventually(taken, "pages of both ranks are finished before they are given up")
        assert stored[0] == stored[1]
        return stored[0]

    def store_shard(self, nodes: list[int], shard: int) -> int | None:
        pages = pages_of(nodes, shard, 0, RANKS.page_bytes)
        result = self.call(lambda: self.ranks.store(nodes, pages, shard, timeout_s=CALL_S))
        return None if GIVEN_UP & set(result.dropped) else result.stored

    def store(self, ns: Any = None) -> list[int]:
        ns = ns or self.ns

        def stored() -> list[int]:
            nodes = self.new_nodes(PROMPT)
            pages = pages_of(nodes, 0, 0, SPACE.page_bytes)
            result = self.call(lambda: ns.store(nodes, pages, timeout_s=CALL_S))
            assert result.stored == PROMPT or GIVEN_UP & set(result.dropped), result
            return nodes if result.stored == PROMPT else []

        return eventually(stored, "a prompt is finished before it is given up")

    def load(self, nodes: list[int], ns: Any = None) -> int:
        out = np.zeros((len(nodes), SPACE.page_bytes), np.uint8)
        loaded = self.call(lambda: (ns or self.ns).load(nodes, out, timeout_s=CALL_S))
        check_pages(out[:loaded], nodes[:loaded], 0, 0)
        return int(loaded)

    def go_on(self, *, filled: bool = False) -> None:
        """filled: the other one's pages take the place of ours as fast as they come."""
        for ns in (self.ns, self.remote) * 3:
            assert self.load(self.store(ns), ns) == PROMPT or filled
        for prompt in range(40):  # what the frozen one stores
            self.load([prompt << 8 | place for place in range(PROMPT)])
        assert self.take_reserve(self.alone // 2) == self.alone // 2
        self.call(self.client.status)

    @property
    def dram(self) -> Any:
        return self.client.status()["core"]["tiers"]["dram"]


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN + "\n")
    tokens.chmod(0o600)
    with Serving(tmp_path, listen="127.0.0.1:0", token_file=str(tokens), **SIZES) as serving:
        yield serving


@pytest.fixture
def good(serving: Serving) -> Iterator[Good]:
    good = Good(serving)
    yield good
    good.client.close()


def bad(serving: Serving, program: str, space: kvw.Namespace, rng: random.Random) -> ClientProcess:
    process = ClientProcess(
        serving.address,
        program,
        space=space.to_fields(),
        seed=rng.getrandbits(32),
        prompt=PROMPT,
        socket=serving.socket,
        slots=str(serving.arena_dir / "slots"),
    )
    assert process.hear() == "ready"
    return process


def check_given_back(good: Good) -> None:
    def settled() -> bool:
        return good.dram["reserved_slots"] + good.dram["limbo_slots"] == 0

    eventually(settled, "what the bad one held is free")
    assert good.take_reserve(good.alone) == good.alone


def test_client_goes_on_beside_one_that_is_frozen_and_beside_its_awakening(
    serving: Serving, good: Good, rng: random.Random
) -> None:
    for _ in range(TRIALS):
        with bad(serving, FREEZER, SPACE, rng) as process:

            def caught() -> bool:
                threading.Event().wait(rng.uniform(0, 0.05))  # anywhere: that is the point
                process.stop()
                if good.dram["reserved_slots"] > 0:
                    return True
                process.resume()
                return False

            eventually(caught, "it is frozen in the middle of a store")
            good.go_on()
            if rng.random() < 0.5:
                eventually(lambda: good.dram["limbo_slots"] > 0, "its pages are given up")
                good.go_on()
            process.resume()
            good.go_on()
            process.tell("end")
            assert process.hear() == []
            good.go_on()
        check_given_back(good)
        tally.count("client beside one that is frozen in its calls")


@pytest.mark.parametrize("kind", WORST)
def test_client_goes_on_beside_one_that(
    serving: Serving, good: Good, rng: random.Random, kind: str
) -> None:
    for _ in range(TRIALS):
        with worst(serving, kind, rng) as neighbour:
            neighbour.go()
            good.go_on(filled=kind == FILLS)
            if kind in HOLDERS:
                eventually(lambda: good.dram["limbo_slots"] > 0, "its pages are given up")
            good.go_on(filled=kind == FILLS)
            neighbour.stop()
        check_given_back(good)
        tally.count(f"client beside one that {kind}")


def test_client_goes_on_beside_one_that_takes_its_share_in_each_of_many_sessions(
    serving: Serving, good: Good, rng: random.Random
) -> None:
    """Each session got half of the rest: thirty of a process left the others not even a page."""
    with bad(serving, HOARDER, OTHERS, rng) as process:
        good.go_on()
        eventually(lambda: good.dram["limbo_slots"] > 0, "its pages are given up")
        good.go_on()
        process.tell("end")
    check_given_back(good)


def test_every_bad_neighbour_is_one_that_there_is() -> None:
    assert set(WORST) | set(WORST.values()) <= set(neighbours.WORK)


def worst(serving: Serving, kind: str, rng: random.Random) -> Neighbour:
    return Neighbour(
        kind,
        address=serving.address,
        listen=serving.events("ready")[0]["listen"],
        token=TOKEN,
        slots=str(serving.arena_dir / "slots"),
        space=OTHERS.to_fields(),
        seed=rng.getrandbits(32),
    )


def test_session_is_not_taken_over_by_another_process(serving: Serving, good: Good) -> None:
    """Ids lie open in the sessions' directory. Who took one over was told what it writes, and could
    give it up: its slots went to others while it still wrote to them."""
    good.client.open(OTHERS)
    with RawSession(serving.socket) as session:
        granted = session.reserve(OTHERS.id, [bytes([number] * 16) for number in range(4)])
        assert len(granted) == 4
        there = [int(path.name, 16) for path in (serving.arena_dir / "sessions").iterdir()]
        given = {"socket": serving.socket, "sessions": there}
        with ClientProcess(serving.address, HIJACK, **given) as process:
            taken = process.hear()
        assert len(taken) == len(there) >= 2
        assert not {number for number, _ in taken} & set(there)
        assert len({size_bytes for _, size_bytes in taken}) == 1  # and is told of nothing
        assert good.dram["reserved_slots"] + good.dram["limbo_slots"] == 4
        session.settle(granted)  # its connection is there still
    check_given_back(good)
