"""The stream of KV events over feeds of a double: what it does when the core lost changes, refuses
a feed, or breaks."""

from __future__ import annotations

import io
import json
import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.config import Config
from kvwarehouse.daemon import event_stream
from kvwarehouse.daemon.event_batch import hash_of
from kvwarehouse.daemon.event_stream import EventStream
from kvwarehouse.daemon.ledger import Ledger, NamespaceRecord
from kvwarehouse.daemon.logs import Log
from kvwarehouse.errors import CapacityError, TransportError
from kvwarehouse.types import Namespace
from kvwarehouse_bench.harness.eventually import eventually
from testkit.kv_subscriber import KvSubscriber

CLEARED = ("cleared", 0, 0, 0, bytes(16), b"", True, b"")
SYNCED = ("synced", 0, 0, 0, bytes(16), b"", True, b"")


def stored(number: int) -> Any:
    return ("stored", 1, bytes(16), 0, number.to_bytes(16, "little"), b"", True, bytes(16))


def block(number: int) -> int:
    return hash_of(number.to_bytes(16, "little"))


class ScriptedFeed:
    """Says `begins` when it is opened and after each restart; and what a test adds."""

    def __init__(self, begins: list[Any]) -> None:
        self.begins = begins
        self.restarts = 0
        self.closed = False
        self.says: queue.Queue[Any] = queue.Queue()
        self.says.put(begins)

    def take(self, timeout_s: float) -> dict[str, Any]:
        try:
            said = self.says.get(timeout=min(timeout_s, 0.02))
        except queue.Empty:
            return {"items": [], "lost": False, "closed": self.closed}
        if isinstance(said, Exception):
            raise said
        if said == "lost":
            return {"items": [], "lost": True, "closed": False}
        return {"items": said, "lost": False, "closed": False}

    def restart(self) -> None:
        self.restarts += 1
        self.says.put(self.begins)

    def close(self) -> None:
        self.closed = True


SPACE = Namespace(model="m", weights="w", dtype="f", layout="t/1", page_tokens=4, page_bytes=64)


class ScriptedWarehouse:
    def __init__(self) -> None:
        self.known = [NamespaceRecord(0, SPACE, 0, 0)]
        self.feeds: list[ScriptedFeed] = []
        self.refusals = 0
        self.begins: list[Any] = [CLEARED, stored(1), stored(2), SYNCED]

    def namespaces(self) -> list[NamespaceRecord]:
        return self.known

    def listen(self, listener: Any) -> None:
        pass

    def watch(self, record: NamespaceRecord, *, tokens_only: bool) -> ScriptedFeed:
        assert tokens_only
        if self.refusals:
            self.refusals -= 1
            raise CapacityError("16 watchers are there already", code="too_many_watchers")
        self.feeds.append(ScriptedFeed(self.begins))
        return self.feeds[-1]


class Rig:
    def __init__(
        self, folder: Path, warehouse: ScriptedWarehouse | None = None, **settings: Any
    ) -> None:
        self.warehouse = warehouse or ScriptedWarehouse()
        self.said = io.StringIO()
        self.endpoints = (f"ipc://{folder}/e", f"ipc://{folder}/r")
        config = Config(kv_events=self.endpoints[0], kv_events_replay=self.endpoints[1], **settings)
        self.stream = EventStream(config, self.warehouse, Log("json", self.said))  # type: ignore[arg-type]
        self.subscriber = KvSubscriber(*self.endpoints)

    def logged(self, name: str) -> bool:
        return any(json.loads(line)["event"] == name for line in self.said.getvalue().splitlines())

    def knows(self, *numbers: int) -> None:
        def equal() -> bool:
            self.subscriber.read()
            return self.subscriber.blocks.keys() == {block(number) for number in numbers}

        eventually(equal, f"the subscriber knows {numbers}")

    def close(self) -> None:
        self.stream.stop()
        self.subscriber.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it tries again, it tries soon."""
    monkeypatch.setattr(event_stream, "IDLE_S", 0.05)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_loss_is_followed_by_a_clear_and_everything_again(rig: Rig) -> None:
    rig.stream.start()
    rig.knows(1, 2)
    (feed,) = rig.warehouse.feeds
    feed.says.put([stored(3)])
    rig.knows(1, 2, 3)
    clears = rig.subscriber.clears
    feed.says.put("lost")
    rig.knows(1, 2)
    assert feed.restarts == 1
    assert rig.subscriber.clears == clears + 1
    assert rig.stream.status().losses == 1
    assert rig.logged("kv_events_lost")


@pytest.mark.usefixtures("soon")
def test_core_that_refuses_a_feed_is_asked_again(rig: Rig) -> None:
    rig.warehouse.refusals = 1
    rig.stream.start()
    rig.knows(1, 2)
    assert rig.logged("core_unresponsive")


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("error", "event"),
    [
        (TransportError("the core did not answer", code="core_busy"), "core_unresponsive"),
        (ZeroDivisionError("a bug"), "kv_events_failed"),
    ],
)
def test_stream_begins_anew_after_a_take_that_failed(
    rig: Rig, error: Exception, event: str
) -> None:
    """Incident: what such a take had taken was never said, and no number was missing."""
    rig.stream.start()
    rig.knows(1, 2)
    clears = rig.subscriber.clears
    rig.warehouse.begins = [CLEARED, stored(1), stored(3), SYNCED]
    rig.warehouse.feeds[0].says.put(error)
    rig.knows(1, 3)
    assert rig.subscriber.clears == clears + 1
    assert rig.warehouse.feeds[0].closed
    assert rig.logged(event)


def test_snapshot_that_cannot_be_had_ends_that_replay_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, kv_events_buffer_bytes=1)
    try:
        rig.stream.start()
        rig.knows(1, 2)
        rig.warehouse.feeds[0].says.put([stored(3)])
        rig.knows(1, 2, 3)
        rig.warehouse.refusals = 1
        failed = rig.stream.status().failed_replays
        rig.subscriber._dealer.send_multipart([b"", bytes(8)])  # all is gone from so small a buffer
        eventually(lambda: rig.stream.status().failed_replays > failed, "it failed")
        eventually(lambda: rig.logged("kv_events_replay_failed"), "it is said")
        rig.subscriber.ask(0)
        assert rig.subscriber.blocks.keys() >= {block(1), block(2)}
        assert rig.warehouse.feeds[-1].closed
    finally:
        rig.close()


def test_replay_that_takes_too_long_is_ended_and_may_be_asked_for_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait for it: a subscriber that trickled had the thread for as long as it liked."""
    rig.stream.start()
    rig.knows(1, 2)
    monkeypatch.setattr(event_stream, "REPLAY_S", -1.0)
    rig.subscriber._dealer.send_multipart([b"", bytes(8)])
    eventually(lambda: rig.stream.status().failed_replays, "it failed")
    eventually(lambda: rig.logged("kv_events_replay_failed"), "it is said")
    monkeypatch.undo()
    replays = rig.stream.status().replays
    rig.subscriber.ask(0)
    eventually(lambda: rig.stream.status().replays == replays + 1, "it is counted")


@pytest.mark.usefixtures("soon")
def test_subscriber_that_missed_the_last_message_alone_is_told_it_again(rig: Rig) -> None:
    """Incident: the number was said again with an empty batch. To who had all before it that is the
    next number and no gap: the batch was empty, and its blocks were never known."""
    rig.stream.start()
    rig.knows(1, 2)
    rig.warehouse.feeds[0].says.put([stored(3)])
    eventually(lambda: rig.subscriber.drop() == 1, "the last message is thrown away")
    rig.knows(1, 2, 3)


def test_end_of_the_stream_closes_its_feed_and_sockets(rig: Rig) -> None:
    rig.stream.start()
    rig.knows(1, 2)
    rig.stream.stop()
    assert rig.warehouse.feeds[0].closed
    again = EventStream(  # its endpoints are free
        Config(kv_events=rig.endpoints[0], kv_events_replay=rig.endpoints[1]),
        rig.warehouse,  # type: ignore[arg-type]
        Log("json", rig.said),
    )
    again.start()
    rig.knows(1, 2)
    again.stop()


def test_stream_goes_on_with_the_namespace_registered_last_after_another_was_forgotten(
    tmp_path: Path,
) -> None:
    """Incident: the last one had got the number of the one forgotten, and after the restart the
    stream was of the one before it."""
    ledger = Ledger([str(tmp_path)], b"w" * 16, Log("json", io.StringIO()), expected=False)
    try:
        spaces = [replace(SPACE, model=model) for model in "abc"]
        for number, space in enumerate(spaces):
            ledger.add(replace(ledger.propose(space), created_at_ns=number))
        ledger.forget([spaces[0].id])
        warehouse = ScriptedWarehouse()
        warehouse.known = ledger.namespaces()
    finally:
        ledger.close()
    rig = Rig(tmp_path, warehouse)
    try:
        rig.stream.start()
        assert rig.stream.status().namespace_id == spaces[2].id.hex()
    finally:
        rig.close()
