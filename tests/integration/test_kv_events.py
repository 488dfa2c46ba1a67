"""KV events over real ZeroMQ sockets: what a subscriber makes of them is what the warehouse has,
after stores, evictions, a clear, restarts, and whatever it missed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.cli import main
from kvwarehouse.daemon.event_batch import hash_of
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.process import free_port
from kvwarehouse_bench.harness.serving import RefusedError, Serving
from testkit.hostile_doors import zmtp_greeting
from testkit.kv_subscriber import KvSubscriber

PAGE_TOKENS = 4
PAGE_BYTES = 4096
_MEDIA = {"dram": "CPU", "nvme": "DISK"}


def space(model: str = "m", **fields: Any) -> kvw.Namespace:
    return kvw.Namespace(
        model=model, weights="w", dtype="f", layout="t/1",
        page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES, **fields,
    )  # fmt: skip


class Published(Serving):
    """A daemon that publishes KV events."""

    def __init__(self, disk: Path, **settings: Any) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.replay_endpoint = f"tcp://127.0.0.1:{free_port()}"
        super().__init__(
            disk, kv_events=self.endpoint, kv_events_replay=self.replay_endpoint, **settings
        )

    def subscribe(self) -> KvSubscriber:
        return KvSubscriber(self.endpoint, self.replay_endpoint)


def prompt(number: int, pages: int) -> np.ndarray[Any, Any]:
    return np.arange(pages * PAGE_TOKENS, dtype=np.uint32) + number * 100_000


def store(client: kvw.Client, number: int, pages: int, model: str = "m") -> None:
    stored = client.open(space(model)).store(
        prompt(number, pages), np.full((pages, PAGE_BYTES), number % 251, np.uint8)
    )
    assert stored.stored == pages, stored


def listed(client: kvw.Client, wanted: kvw.Namespace | None = None) -> dict[int, set[str]]:
    return {
        hash_of(page.key): {_MEDIA[tier] for tier in page.tiers}
        for page in client.pages(wanted or space())
    }


def replays(serving: Serving, answer: str) -> float:
    return serving.metrics()[f'kvwarehouse_kv_event_replays_total{{answer="{answer}"}}']


def stored_blocks(serving: Serving) -> float:
    """As published: of each tier by itself."""
    return serving.metrics()['kvwarehouse_kv_event_blocks_total{change="stored"}']


def published_more(serving: Serving) -> Callable[[], bool]:
    """Whether batches were published since the call of this."""
    name = "kvwarehouse_kv_event_batches_total"
    before = serving.metrics()[name]
    return lambda: serving.metrics()[name] > before


def agrees(subscriber: KvSubscriber, client: kvw.Client) -> None:
    """Waits until the subscriber knows exactly what the warehouse has."""

    def equal() -> bool:
        subscriber.read()
        return subscriber.blocks == listed(client)

    eventually(equal, "the subscriber knows what the warehouse has")
    assert not subscriber.problems, subscriber.problems[:3]


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Published]:
    with Published(tmp_path, nvme_capacity="64MiB") as serving:
        yield serving


def test_subscriber_knows_what_is_stored_evicted_and_cleared(serving: Published) -> None:
    with serving.connect() as client, serving.subscribe() as subscriber:
        for number in range(20):
            store(client, number, 5)
        agrees(subscriber, client)
        assert len(subscriber.blocks) == 100
        client.flush(timeout_s=30)
        agrees(subscriber, client)
        assert all(media == {"CPU", "DISK"} for media in subscriber.blocks.values())
        assert client.evict(space(), pages=30, tiers="dram") == 30
        agrees(subscriber, client)
        assert client.evict(space(), pages=20, tiers="all") == 20
        agrees(subscriber, client)
        assert len(subscriber.blocks) == 80
        client.clear(space())
        agrees(subscriber, client)
        assert not subscriber.blocks


def test_blocks_carry_the_token_ids_of_their_pages(serving: Published) -> None:
    with serving.connect() as client, serving.subscribe() as subscriber:
        store(client, 3, 6)
        agrees(subscriber, client)
        by_position = {page.position: hash_of(page.key) for page in client.pages(space())}
        for position, block in by_position.items():
            start = position * PAGE_TOKENS
            assert subscriber.tokens[block] == prompt(3, 6)[start : start + PAGE_TOKENS].tolist()


def test_subscriber_that_missed_messages_asks_for_them_and_knows_again(serving: Published) -> None:
    with serving.connect() as client, serving.subscribe() as subscriber:
        store(client, 1, 3)
        agrees(subscriber, client)
        gaps, clears = subscriber.gaps, subscriber.clears
        # Two, as an idle stream says the last one again: who missed that alone knows it then.
        store(client, 2, 3)
        eventually(lambda: subscriber.drop() >= 1, "a message that is thrown away")
        store(client, 3, 3)
        eventually(lambda: subscriber.drop() >= 2, "another one")
        store(client, 4, 3)
        agrees(subscriber, client)
        assert subscriber.gaps > gaps
        assert subscriber.clears == clears  # from the buffer: nothing was said anew
        eventually(lambda: replays(serving, "buffer") >= 1, "it is counted")


def test_subscriber_that_comes_late_hears_all_without_anything_happening(
    serving: Published,
) -> None:
    with serving.connect() as client:
        store(client, 1, 4)
        eventually(lambda: stored_blocks(serving) >= 4, "the events are published")
        with serving.subscribe() as subscriber:
            agrees(subscriber, client)
            assert subscriber.replayed > 0


def test_what_the_buffer_has_not_got_any_more_is_said_anew(tmp_path: Path) -> None:
    settings = {"kv_events_buffer": "4KiB", "nvme_capacity": "64MiB"}
    with Published(tmp_path, **settings) as serving, serving.connect() as client:
        for number in range(40):
            more = published_more(serving)
            store(client, number, 2)
            eventually(more, "its events are published")
        client.flush(timeout_s=60)
        # Nothing happens any more: what did would take the subscriber's place in the buffer again.
        eventually(lambda: stored_blocks(serving) == 160, "those of NVMe are published too")
        with serving.subscribe() as subscriber:
            agrees(subscriber, client)
            assert len(subscriber.blocks) == 80
            assert subscriber.clears == 1
            numbers = [number for number, _ in subscriber.replay(0)]
            assert numbers == sorted(numbers)  # and none beyond what the stream has said
            assert numbers[-1] <= subscriber.last  # type: ignore[operator]
        eventually(lambda: replays(serving, "snapshot") >= 1, "it is counted")


@pytest.mark.parametrize("ending", ["stop", "kill", "reboot"])
def test_subscriber_knows_what_is_there_after_a_restart(tmp_path: Path, ending: str) -> None:
    with Published(tmp_path, nvme_capacity="64MiB") as serving, serving.subscribe() as subscriber:
        with serving.connect() as client:
            for number in range(10):
                store(client, number, 4)
            client.flush(timeout_s=30)
            client.evict(space(), pages=7, tiers="dram")
            agrees(subscriber, client)
        last = subscriber.last
        serving.kill() if ending == "kill" else serving.stop()
        if ending == "reboot":
            serving.lose_arena()
        serving.start()
        with serving.connect() as client:
            # What it knows from before may be right until it hears the new daemon.
            eventually(
                lambda: subscriber.read() >= 0 and subscriber.clears >= 2, "all is told anew"
            )
            agrees(subscriber, client)
            assert len(subscriber.blocks) == 40
            store(client, 11, 4)
            agrees(subscriber, client)
        # A subscriber passes over numbers that are not above its last.
        assert subscriber.last > last  # type: ignore[operator]


def test_subscriber_of_a_busy_warehouse_that_runs_over_ends_up_right(tmp_path: Path) -> None:
    settings = {"nvme_capacity": "16MiB", "dram": "8MiB"}
    with (
        Published(tmp_path, **settings) as serving,
        serving.connect() as client,
        serving.subscribe() as subscriber,
    ):
        opened = client.open(space())
        store(client, 400, 1)
        agrees(subscriber, client)  # the stream has begun: what leaves from here on is told
        for number in range(400):  # some 4,000 pages of room, 8,000 stored
            opened.store(prompt(number, 20), np.zeros((20, PAGE_BYTES), np.uint8))
            if number % 50 == 0:
                subscriber.read(0)
        client.flush(timeout_s=30)
        agrees(subscriber, client)
        metrics = serving.metrics()
        assert metrics['kvwarehouse_kv_event_blocks_total{change="removed"}'] > 0


def test_absent_and_stopped_subscribers_slow_no_store(serving: Published) -> None:
    with serving.connect() as client, serving.subscribe() as subscriber:
        for number in range(200):  # nobody reads meanwhile
            store(client, number, 10)
        agrees(subscriber, client)


def test_pages_stored_by_keys_alone_are_not_in_the_stream(serving: Published) -> None:
    keyed = space("keyed", hash_scheme="engine/1")
    with serving.connect() as client, serving.subscribe() as subscriber:
        store(client, 1, 2)
        opened = client.open(keyed)
        opened.store(keys=[b"a" * 32, b"b" * 32], pages=np.zeros((2, PAGE_BYTES), np.uint8))
        store(client, 2, 2)
        agrees(subscriber, client)
        assert len(listed(client, keyed)) == 2


def test_stream_goes_over_to_the_namespace_that_is_registered_last(serving: Published) -> None:
    with serving.connect() as client, serving.subscribe() as subscriber:
        store(client, 1, 3, "old")
        eventually(
            lambda: subscriber.read() and len(subscriber.blocks) == 3, "the first one's pages"
        )
        store(client, 1, 5, "new")
        wanted = listed(client, space("new"))
        eventually(
            lambda: subscriber.read() and subscriber.blocks.keys() == wanted.keys(), "the other"
        )
        store(client, 2, 5, "old")  # known already: registered once
        store(client, 2, 5, "new")
        wanted = listed(client, space("new"))
        eventually(
            lambda: subscriber.read() and subscriber.blocks.keys() == wanted.keys(), "and stays"
        )


@pytest.mark.parametrize("by", ["model", "id"])
def test_stream_is_of_the_namespace_that_was_named(tmp_path: Path, by: str) -> None:
    named = "wanted" if by == "model" else space("wanted").id.hex()
    settings = {"kv_events_namespace": named, "kv_events_topic": "kv@pod@wanted"}
    with (
        Published(tmp_path, **settings) as serving,
        serving.connect() as client,
        serving.subscribe() as subscriber,
    ):
        store(client, 1, 3, "wanted")
        store(client, 1, 3, "other")
        wanted = listed(client, space("wanted")).keys()
        eventually(lambda: subscriber.read() and subscriber.blocks.keys() == wanted, "its pages")
        assert subscriber.topics == {b"kv@pod@wanted"}


def test_senseless_requests_for_replay_harm_nobody(serving: Published) -> None:
    with serving.connect() as client, serving.subscribe() as subscriber:
        store(client, 1, 3)
        agrees(subscriber, client)
        for frames in ([b""], [b"", b"12"], [b"x", bytes(8)], [b"", bytes(8), b""], [b""] * 40):
            subscriber._dealer.send_multipart(frames)
        subscriber.ask(2**64 - 1)
        subscriber.ask(0)
        store(client, 2, 3)
        agrees(subscriber, client)
        assert replays(serving, "failed") == 5


def test_status_says_what_was_published(
    serving: Published, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving.connect() as client, serving.subscribe() as subscriber:
        store(client, 1, 3)
        client.flush(timeout_s=30)
        agrees(subscriber, client)
    assert main(["status", "--address", serving.address]) == 0
    shown = capsys.readouterr().out
    assert f"6 blocks stored, 0 removed of namespace {space().id.hex()[:12]}" in shown


def test_daemon_without_events_listens_for_none_and_has_no_figures_of_them(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        assert not [name for name in serving.metrics() if "kv_event_" in name]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_events": "tcp://*:5557"}, "--kv-events-exposure network"),
        ({"kv_events": "tcp://10.0.0.1:5557"}, "token ids of prompts in clear"),
        ({"kv_events": "udp://127.0.0.1:1"}, "write tcp://HOST:PORT"),
        ({"kv_events": "tcp://127.0.0.1:0"}, "no port from 1 to 65535"),
        ({"kv_events_replay": "tcp://127.0.0.1:1"}, "of no use without --kv-events"),
        ({"kv_events": "ipc:///a", "kv_events_replay": "ipc:///a"}, "give each its own"),
        ({"kv_events": "ipc:///nowhere/at/all"}, "is the address this host's"),
    ],
)
def test_daemon_refuses_to_start_with_endpoints_that_cannot_be(
    tmp_path: Path, settings: dict[str, str], said: str
) -> None:
    serving = Serving(tmp_path, **settings)
    try:
        with pytest.raises(RefusedError) as refused:
            serving.start()
        assert said in refused.value.text
        assert refused.value.status == 2 if said != "is the address this host's" else True
    finally:
        serving.remove()


def test_events_over_a_unix_socket(tmp_path: Path) -> None:
    serving = Published(tmp_path)
    serving.endpoint = f"ipc://{serving.folder}/events"
    serving.replay_endpoint = f"ipc://{serving.folder}/replay"
    serving.settings.update(kv_events=serving.endpoint, kv_events_replay=serving.replay_endpoint)
    with serving, serving.connect() as client, serving.subscribe() as subscriber:
        store(client, 1, 3)
        agrees(subscriber, client)


def test_number_that_is_repeated_on_an_idle_stream_is_the_last(serving: Published) -> None:
    with serving.connect() as client, serving.subscribe() as subscriber:
        store(client, 1, 2)
        agrees(subscriber, client)

        def repeated() -> bool:
            last = subscriber.last
            return subscriber.read(0.2) == 1 and subscriber.last == last

        eventually(repeated, "an idle stream says that it is there")


@pytest.mark.parametrize("what", ["parts", "message"])
@pytest.mark.parametrize("port", ["events", "replay"])
def test_stranger_cannot_make_the_daemon_grow(tmp_path: Path, what: str, port: str) -> None:
    """20 MB of message parts without an end were 512 MiB in ZeroMQ."""
    replay = port == "replay"
    more = b"\x01\x00" * (1 << 15) if what == "parts" else bytes(1 << 16)
    with Published(tmp_path) as serving, serving.connect() as client:
        where = (serving.replay_endpoint if replay else serving.endpoint).rpartition(":")[2]
        with socket.create_connection(("127.0.0.1", int(where)), 60) as stranger:
            greeting, ready = zmtp_greeting(b"DEALER" if replay else b"SUB")
            stranger.sendall(greeting)
            assert stranger.recv(1)  # it has greeted too
            stranger.sendall(ready)
            if what == "message":
                stranger.sendall(b"\x02" + (1 << 32).to_bytes(8, "big"))
            with pytest.raises(ConnectionError):
                stranger.sendall(more * (1 << 10))
        store(client, 1, 3)
        with serving.subscribe() as subscriber:
            agrees(subscriber, client)
        if what == "parts":
            assert client.status()["kv_events"]["ended_peers"]
