"""Every bound of a daemon reached, one on top of the other in a random order, by two tenants with
pages of two sizes: each call ends, by success or by the refusal that the bound has, and once what
is held is given back both tenants store and hit again.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse import core
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_bench.strain.raw_protocols import RawSession
from testkit import tally

LONG = tally.rounds(1) > 1  # `make faults`
pytestmark = pytest.mark.timeout(900 if LONG else 240)

SIZES = {
    "dram": "16MiB",
    "index_pages": "512",
    "nvme_capacity": "16MiB",
    "nvme_segment": "2MiB",
    "grace_s": "0.1",
    "limbo_after_s": "0.5",
}
SPACES = [
    kvw.Namespace(
        model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=page_bytes,
        salt=tenant,
    )
    for tenant in ("one", "other")
    for page_bytes in (16_000, 100_000)
]  # fmt: skip
PROMPT = 8
CALL_S = 2.0
HANGS_S = 45.0  # far beyond CALL_S, even on a machine with much else to do
# stale: pages that were not finished within --limbo-after-s, where a process stood still.
REFUSALS = {
    "reserve_limit", "no_room", "later", "index_full", "parent_missing", "refused_tail", "timeout",
    "busy", "stale",
}  # fmt: skip
MOST = 5000  # of anything that is taken until it is refused


class Tenants:
    """One client each; what they hold is given back by the stack."""

    def __init__(self, serving: Serving, held: ExitStack, rng: random.Random) -> None:
        self.serving, self.held, self.rng = serving, held, rng
        self.clients = {salt: self.connect() for salt in ("one", "other")}
        # Beforehand: later there may be no room for a session.
        self.raw = [held.enter_context(RawSession(serving.socket)) for _ in range(6)]
        self.next = rng.getrandbits(24)

    def connect(self) -> kvw.Client:
        return self.held.enter_context(self.serving.connect(timeout_s=60))

    def opened(self, space: kvw.Namespace) -> Any:
        return self.clients[space.salt].open(space)

    def store(self, space: kvw.Namespace) -> tuple[list[int], kvw.StoreResult]:
        self.next += PROMPT
        nodes = list(range(self.next, self.next + PROMPT))
        pages = pages_of(nodes, 0, 0, space.page_bytes)
        result = kvw.StoreResult(0, 0, {"timeout": PROMPT})
        with ends_late():
            result = self.opened(space).store(nodes, pages, timeout_s=CALL_S)
        assert result.stored + result.already + result.dropped_pages == PROMPT
        assert set(result.dropped) <= REFUSALS, result
        return nodes, result

    def load(self, space: kvw.Namespace, nodes: list[int]) -> int:
        out = np.zeros((PROMPT, space.page_bytes), np.uint8)
        loaded = self.opened(space).load(nodes, out, timeout_s=CALL_S)
        check_pages(out[:loaded], nodes[:loaded], 0, 0)
        assert loaded == PROMPT or loaded.missed
        return int(loaded)

    # --- bounds

    def fill_tiers(self) -> None:
        """Twice what the arena, the index and NVMe hold; or until it is refused."""
        for space in SPACES:
            for _ in range(2 * (16 << 20) // (len(SPACES) * PROMPT * space.page_bytes)):
                if self.store(space)[1].dropped:
                    break

    def fill_index(self) -> None:
        """Small pages are bound by it, not by the arena."""
        for at in range(160):
            if self.store(SPACES[2 * (at % 2)])[1].dropped:
                break

    def take_pins(self) -> None:
        for space in SPACES:
            nodes, _ = self.store(space)
            with contextlib.suppress(kvw.PinError):
                for _ in range(MOST):
                    pins = self.opened(space).pin(nodes)
                    self.held.callback(pins.release)
                    if not pins.pages:
                        break
                else:
                    raise AssertionError("pins have no bound")

    def take_grants(self) -> None:
        for at, session in enumerate(self.raw):
            space = SPACES[at % len(SPACES)]
            for _ in range(MOST):
                if not session.reserve(space.id, [self.rng.randbytes(16) for _ in range(8)]):
                    break
            else:
                raise AssertionError("grants have no bound")

    def take_sessions(self) -> None:
        def connect() -> None:
            client = core.NativeClient(self.serving.socket, True, 30.0)
            self.held.callback(client.close)

        check_refused(connect, "too_many_sessions")

    def take_namespaces(self) -> None:
        """More than there may be: those that are empty give their places."""
        for number in range(core.MAX_NAMESPACES + 64):
            space = kvw.Namespace(**{**SPACES[0].to_fields(), "adapter": str(number)})
            self.clients["one"].open(space)

    # --- what holds

    def timed(self, ask: Callable[[], object]) -> None:
        begun_s = time.monotonic()
        ask()
        assert time.monotonic() - begun_s < HANGS_S, f"{ask} hangs"

    def probe(self, space: kvw.Namespace) -> None:
        """Every kind of call, whatever is reached."""
        nodes: list[int] = []
        self.timed(lambda: nodes.extend(self.store(space)[0]))
        self.timed(lambda: self.load(space, nodes))
        self.timed(lambda: self.opened(space).lookup(nodes))
        with contextlib.suppress(kvw.PinError):
            self.timed(lambda: self.opened(space).pin(nodes, timeout_s=CALL_S).release())
        client = self.clients[space.salt]
        self.timed(lambda: client.evict(space, 1, "all"))
        self.timed(client.status)
        with ends_late():
            self.timed(lambda: client.flush(CALL_S))

    def check_hits(self) -> None:
        for space in SPACES:

            def hits(space: kvw.Namespace = space) -> bool:
                nodes, result = self.store(space)
                return result.stored == PROMPT and self.load(space, nodes) == PROMPT

            eventually(hits, f"{space.salt} stores and hits pages of {space.page_bytes} bytes")


@contextlib.contextmanager
def ends_late() -> Iterator[None]:
    """A call may end by its deadline, where the daemon stands still for as long as that."""
    try:
        yield
    except kvw.TransportError as error:
        if error.code != "deadline":
            raise


def check_refused(take: Callable[[], None], code: str) -> None:
    def take_all() -> None:
        for _ in range(MOST):
            take()

    with pytest.raises(kvw.CapacityError) as caught:
        take_all()
    assert caught.value.code == code


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, **SIZES) as serving:
        with serving.connect(timeout_s=60) as client:
            for space in SPACES:
                client.open(space)
        yield serving


def test_bounds_on_top_of_each_other_are_refusals_and_both_tenants_hit_afterwards(
    serving: Serving, rng: random.Random
) -> None:
    for trial in range(tally.rounds(1)):
        with ExitStack() as held:
            tenants = Tenants(serving, held, rng)
            bounds = [
                tenants.fill_tiers, tenants.fill_index, tenants.take_pins, tenants.take_grants,
                tenants.take_sessions,
            ]  # fmt: skip
            if LONG and trial == 0:
                bounds.append(tenants.take_namespaces)
            rng.shuffle(bounds)
            for reach in bounds:
                reach()
                tenants.probe(rng.choice(SPACES))
        with ExitStack() as held:
            Tenants(serving, held, rng).check_hits()
        tally.count("bound reached on top of others, by two tenants", len(bounds))
