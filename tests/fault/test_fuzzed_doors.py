"""Hostile input at each door of a daemon that serves good clients: both local sockets, gRPC on TCP
before the token and behind it, HTTP, and both ports of KV events. The good ones go on meanwhile,
and afterwards the daemon is as it was: its memory and descriptors, its probes, what is stored, and
not much more in its log. Each door is fuzzed for a while before it is measured, so that what
allocators and pools of threads keep at their busiest is there already.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse import config
from kvwarehouse.client.why import WhyAnswer
from kvwarehouse.daemon import interceptors
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.process import free_port
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_bench.strain import resource_snapshot
from testkit import fuzz, tally
from testkit.hostile_doors import (
    Door,
    SessionDoor,
    at_tcp,
    at_unix,
    grpc_said,
    http_said,
    kv_events_said,
)
from testkit.kv_subscriber import KvSubscriber

LONG = tally.rounds(1) > 1  # `make faults`
FUZZED_S = 60.0 if LONG else 1.0
pytestmark = pytest.mark.timeout(600 if LONG else 240)

CORPUS = Path(__file__).parent.parent / "fuzz" / "corpus"
DOORS = (
    "the session socket", "the socket of gRPC", "TCP without a token", "TCP with a token", "HTTP",
    "KV events", "replays of KV events",
)  # fmt: skip
HOSTILE = 2
TOKEN = "0123456789abcdef0123456789abcdef"
CALL_S = 30.0
PROMPT = 4
_THREADS = "daemon: threads"
THREADS = 2 * interceptors.threads_of(config.Config().streams) + 32
"""Those of gRPC's two pools, which it starts as more calls come at once, and the others."""
LOG_LINES_S = 40
"""What any of it may add to the log: a few lines of each kind a second."""


def space(salt: str) -> kvw.Namespace:
    return kvw.Namespace(
        model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=20_000,
        salt=salt,
    )  # fmt: skip


FOR_ROOM = {"evicted", "reclaimed", "rebalanced"}
KEPT, HOSTILES = space("kept"), space("hostile")
KEPT_NODES = list(range(1, 9))


@dataclass(frozen=True)
class Open:
    """A daemon with all of its doors."""

    serving: Serving
    events: tuple[str, str]

    def door(self, name: str) -> Door:
        ready = self.serving.events("ready")[0]
        service = fuzz.read_corpus([CORPUS / "service"])
        grpc_socket = at_unix(self.serving.socket + ".grpc")
        if name == "the session socket":
            # The first byte of an input is its fuzz target's own.
            messages = [each[1:] for each in fuzz.read_corpus([CORPUS / "messages"])]
            return SessionDoor(self.serving.socket, HOSTILES.id, messages)
        return Door(*{
            "the socket of gRPC": (grpc_socket, grpc_said(service)),
            "TCP without a token": (at_tcp(ready["listen"]), grpc_said(service)),
            "TCP with a token": (at_tcp(ready["listen"]), grpc_said(service, TOKEN)),
            "HTTP": (at_tcp(ready["http"]), http_said),
            "KV events": (at_tcp(self.events[0]), kv_events_said),
            "replays of KV events": (at_tcp(self.events[1]), kv_events_said),
        }[name])  # fmt: skip

    def get(self, path: str) -> bytes:
        address = self.serving.events("ready")[0]["http"]
        with urllib.request.urlopen(f"http://{address}{path}", timeout=DEADLINE_S) as answer:
            return bytes(answer.read())


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    folder = tmp_path_factory.mktemp("doors")
    tokens = folder / "tokens"
    tokens.write_text(TOKEN + "\n")
    tokens.chmod(0o600)
    events = (f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}")
    settings = {
        "dram": "32MiB", "nvme_capacity": "32MiB", "nvme_segment": "2MiB", "grace_s": "0.1",
        "limbo_after_s": "1", "listen": "127.0.0.1:0", "token_file": str(tokens),
        "kv_events": f"tcp://{events[0]}", "kv_events_replay": f"tcp://{events[1]}",
    }  # fmt: skip
    with Serving(folder, **settings) as serving:
        yield Open(serving, events)


# --- good clients


class Beside:
    """Good clients of every kind, each in a thread of its own, until the end of the context; what
    went wrong for one of them is raised there."""

    def __init__(self, opened: Open) -> None:
        self.opened, self.rounds = opened, [0] * 4
        self.failures: list[str] = []
        self.stop = threading.Event()
        at_work = (self.local, self.remote, self.probes, self.subscribed)
        self.threads = [threading.Thread(target=self.run, args=each) for each in enumerate(at_work)]

    def __enter__(self) -> Beside:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        assert not self.failures, self.failures[0]

    def check_all_go_on(self) -> None:
        before = list(self.rounds)

        def all_went_on() -> bool:
            return bool(self.failures) or all(
                now > then for now, then in zip(self.rounds, before, strict=True)
            )

        eventually(all_went_on, "all good clients go on")

    def run(self, number: int, work: Callable[[], Iterator[None]]) -> None:
        try:
            for _ in work():
                self.rounds[number] += 1
                if self.stop.is_set():
                    return
        except BaseException:  # noqa: BLE001  the thread's edge; raised with the context's end
            self.failures.append(traceback.format_exc())

    def local(self) -> Iterator[None]:
        with self.opened.serving.connect(timeout_s=CALL_S) as client:
            for nodes in numbers():
                move(client, "local", nodes)
                yield

    def remote(self) -> Iterator[None]:
        address = self.opened.serving.events("ready")[0]["listen"]
        with kvw.connect(address, token=TOKEN, timeout_s=CALL_S) as client:
            for nodes in numbers():
                # Refused for now, where many call at once.
                with contextlib.suppress(kvw.CapacityError):
                    move(client, "remote", nodes)
                    yield

    def probes(self) -> Iterator[None]:
        while True:
            assert self.opened.get("/healthz") == b"ok\n"
            assert self.opened.get("/readyz") == b"ok\n"
            assert b"kvwarehouse_" in self.opened.get("/metrics")
            yield

    def subscribed(self) -> Iterator[None]:
        events, replays = self.opened.events
        with KvSubscriber(f"tcp://{events}", f"tcp://{replays}") as subscriber:
            heard = 0
            while not self.stop.is_set():
                if subscriber.read(0.2):
                    heard += 1
                    assert not subscriber.problems, subscriber.problems[:3]
                    yield


_firsts = itertools.count(1 << 20, PROMPT)


def numbers() -> Iterator[list[int]]:
    """Of prompts that nobody has stored."""
    for first in _firsts:
        yield list(range(first, first + PROMPT))


def move(client: Any, salt: str, nodes: list[int]) -> None:
    """Stores and loads them, and checks that all are there, but for those that left for the pages
    that others stored meanwhile: some are fast."""
    ns = client.open(space(salt))
    size_bytes = ns.space.page_bytes
    pages = pages_of(nodes, 0, 0, size_bytes)

    def stored() -> kvw.StoreResult | None:
        result = ns.store(nodes, pages, timeout_s=CALL_S)
        return None if "stale" in result.dropped else result

    result = eventually(stored, "a prompt is finished before it is given up")
    out = np.zeros((len(nodes), size_bytes), np.uint8)
    loaded = ns.load(nodes, out, timeout_s=CALL_S)
    check_pages(out[:loaded], nodes[:loaded], 0, 0)
    assert result.stored + result.already == len(nodes), result
    if loaded != len(nodes):
        check_left_for_room(client, ns, nodes)


def check_left_for_room(client: Any, ns: Any, nodes: list[int]) -> None:

    def asked() -> WhyAnswer | None:
        with contextlib.suppress(kvw.CapacityError):  # for now, where many call at once
            return client.why(nodes, space=ns)
        return None

    why = eventually(asked, "why pages are not there is told")
    left = {run.reason for each in why.namespaces for run in each.runs if run.state == "left"}
    assert left, why
    assert left <= FOR_ROOM, why


# --- hostile ones


def fuzzed(opened: Open, name: str, seed: str, seconds: float) -> int:
    """At one door, by several at a time. How many inputs."""
    said, failures = [0] * HOSTILE, list[str]()

    def visit(number: int, end: float) -> None:
        rng = random.Random(f"{seed}:{number}")
        try:
            with opened.door(name) as door:
                while time.monotonic() < end or not said[number]:
                    said[number] += door.visit(rng)
        except BaseException:  # noqa: BLE001  the thread's edge; raised below
            failures.append(traceback.format_exc())

    end = time.monotonic() + seconds
    threads = [threading.Thread(target=visit, args=(n, end)) for n in range(HOSTILE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    return sum(said)


class Shown(str):
    """What grew, for `eventually`: true when nothing did."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return not len(self)


def at_rest(opened: Open, client: kvw.Client) -> resource_snapshot.ResourceSnapshot:
    def rests() -> bool:
        core = client.status()["core"]
        dram = core["tiers"]["dram"]
        return core["sessions"] <= 2 and not dram["reserved_slots"] + dram["limbo_slots"]

    eventually(rests, "the sessions of those who left end")
    return resource_snapshot.take(opened.serving, client)


@pytest.mark.parametrize("name", DOORS)
def test_daemon_is_as_it_was_after_hostile_input_at(opened: Open, name: str, seed: int) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(opened.serving.connect(timeout_s=60))
        client.open(HOSTILES)
        kept = client.open(KEPT)
        kept.store(KEPT_NODES, pages_of(KEPT_NODES, 0, 0, KEPT.page_bytes), timeout_s=60)
        stack.enter_context(kept.pin(KEPT_NODES, timeout_s=60))
        with Beside(opened) as beside:
            beside.check_all_go_on()
            fuzzed(opened, name, f"{seed}:before", FUZZED_S / 2)
        before, lines, begun_s = at_rest(opened, client), opened.serving.lines, time.monotonic()
        with Beside(opened) as beside:
            beside.check_all_go_on()
            inputs = fuzzed(opened, name, f"{seed}", FUZZED_S)
            beside.check_all_go_on()

        def grown() -> str:
            after = at_rest(opened, client)
            return ", ".join(
                f"{what}: {before[what]:g}, then {after[what]:g}"
                for what in resource_snapshot.grown(before, after)
                if what.startswith("daemon") and what != _THREADS
            )

        eventually(lambda: Shown(grown()), "the daemon is as it was")
        assert at_rest(opened, client)[_THREADS] <= THREADS
        logged = opened.serving.lines[len(lines) :]
        print(f"{name}: {inputs} inputs, {len(logged)} lines of log")
        assert len(logged) < LOG_LINES_S * (1 + time.monotonic() - begun_s), logged[-20:]
        assert all(json.loads(line) for line in logged)  # nobody else writes to it
        assert opened.get("/healthz") == opened.get("/readyz") == b"ok\n"
        out = np.zeros((len(KEPT_NODES), KEPT.page_bytes), np.uint8)
        assert int(kept.load(KEPT_NODES, out, timeout_s=60)) == len(KEPT_NODES)
        check_pages(out, KEPT_NODES, 0, 0)
    tally.count(f"hostile input at a door: {name}", inputs)
