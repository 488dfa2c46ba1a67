"""A client that is killed, or stands still, in the middle of a store; one that forks.

What it had reserved comes back, another client can store the same pages, and a late writer never
lands in a page that another sealed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.client_process import ClientProcess
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import Serving
from testkit import tally

pytestmark = pytest.mark.timeout(240)

PAGE_BYTES = 1 << 20
PAGES = 48  # several windows: some reserved, some being copied, some sealed at any moment
NODES = list(range(PAGES))
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=PAGE_BYTES
)
LATE, OTHER = 1, 2  # versions of the pages: who wrote them

# Stores the same prompt again and again, cleared by the test in between.
WRITER = """
space = kvw.Namespace(**given["space"])
ns = client.open(space)
pages = pages_of(given["nodes"], 0, 1, space.page_bytes)
say("ready")
while hear():
    try:
        result = ns.store(given["nodes"], pages, timeout_s=30)
        say([result.stored, result.already, result.dropped])
    except kvw.WarehouseError as error:
        say([0, 0, {error.code: len(pages)}])
"""


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="128MiB", limbo_after_s="0.3", grace_s="0.2") as serving:
        yield serving


@pytest.fixture
def client(serving: Serving) -> Iterator[kvw.Client]:
    with serving.connect(timeout_s=60) as client:
        yield client


def writer(serving: Serving) -> ClientProcess:
    process = ClientProcess(serving.address, WRITER, space=SPACE.to_fields(), nodes=NODES)
    assert process.hear() == "ready"
    return process


def dram(client: kvw.Client) -> Any:
    return client.status()["core"]["tiers"]["dram"]


def stop_in_the_middle(process: ClientProcess, client: kvw.Client, rng: random.Random) -> None:
    """Stops the writer at a moment when it has slots that are not sealed."""

    def caught() -> bool:
        client.clear(SPACE)
        process.tell(True)
        threading.Event().wait(rng.uniform(0, 0.02))  # anywhere in it: that is the point
        process.stop()
        if dram(client)["reserved_slots"] > 0:
            return True
        process.resume()
        process.hear()
        return False

    eventually(caught, "a writer is caught in the middle of a store")


def check_stored(client: kvw.Client, version: int) -> None:
    out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    loaded = client.open(SPACE).load(NODES, out, timeout_s=60)
    check_pages(out[:loaded], NODES[:loaded], 0, version)
    assert loaded == PAGES


def store_others(client: kvw.Client) -> None:
    """What is left of the prompt, by somebody else, with other bytes. Again where this process or
    the daemon stood still for so long that pages were given up."""
    pages = pages_of(NODES, 0, OTHER, PAGE_BYTES)

    def stored() -> bool:
        return not client.open(SPACE).store(NODES, pages, timeout_s=60).dropped

    eventually(stored, "the prompt is stored by somebody else")


@pytest.mark.parametrize("attempt", range(2))
def test_slots_of_a_killed_writer_come_back_and_its_pages_can_be_stored(
    serving: Serving, client: kvw.Client, rng: random.Random, attempt: int
) -> None:
    client.open(SPACE)
    with writer(serving) as process:
        stop_in_the_middle(process, client, rng)
        process.kill()
    eventually(
        lambda: dram(client)["reserved_slots"] + dram(client)["limbo_slots"] == 0,
        "the slots of the dead writer are free",
    )
    client.clear(SPACE)  # what it had sealed has its bytes
    store_others(client)
    check_stored(client, OTHER)
    assert dram(client)["pages"] == PAGES
    tally.count("client killed (SIGKILL) in a store, load or pin")


def test_late_writer_never_lands_in_a_page_that_another_sealed(
    serving: Serving, client: kvw.Client, rng: random.Random
) -> None:
    client.open(SPACE)
    with writer(serving) as process:
        stop_in_the_middle(process, client, rng)
        eventually(lambda: dram(client)["reserved_slots"] == 0, "its pages are given up")
        assert dram(client)["limbo_slots"] > 0, "slots that it may still write are reused"
        client.clear(SPACE)
        store_others(client)
        check_stored(client, OTHER)
        process.resume()
        stored, already, dropped = process.hear()
        assert stored + already + sum(dropped.values()) == PAGES
        assert dropped, "a page that was given up was sealed"
        check_stored(client, OTHER)
        eventually(lambda: dram(client)["limbo_slots"] == 0, "the late writer has let its slots go")
        check_stored(client, OTHER)
        # It is not shut out: its next store is as good as anybody's.
        client.clear(SPACE)

        def stored() -> bool:
            process.tell(True)
            return not process.hear()[2]

        eventually(stored, "the late writer has stored the prompt")
        check_stored(client, LATE)
    tally.count("client stopped (SIGSTOP) beyond every deadline, and continued")


def test_late_writer_of_a_daemon_that_was_killed_meanwhile_harms_nobody(
    serving: Serving, client: kvw.Client, rng: random.Random
) -> None:
    client.open(SPACE)
    with writer(serving) as process:
        stop_in_the_middle(process, client, rng)
        serving.kill()
        serving.start()
        assert dram(client)["limbo_slots"] > 0, "slots that it may still write are reused"
        client.clear(SPACE)
        store_others(client)
        process.resume()
        process.hear()
        check_stored(client, OTHER)
        process.tell(True)  # its next call finds the new daemon, and settles what it owes
        assert process.hear() == [0, PAGES, {}]
        eventually(lambda: dram(client)["limbo_slots"] == 0, "the late writer has let its slots go")
        check_stored(client, OTHER)
    tally.count("client stopped (SIGSTOP) beyond every deadline, and continued")


FORKER = """
space = kvw.Namespace(**given["space"])
ns = client.open(space)
pins = ns.pin(given["nodes"])
child = os.fork()
if child == 0:
    refused = []
    pages = pages_of(given["nodes"], 0, 1, space.page_bytes)
    for call in (
        lambda: ns.lookup(given["nodes"]), lambda: ns.store(given["nodes"], pages),
        lambda: ns.load(given["nodes"], pages), lambda: ns.pin(given["nodes"]), client.status,
        lambda: client.open(space), client.flush,
    ):
        try:
            call()
        except kvw.TransportError as error:
            refused.append(error.code)
    say([pins.pages, os.getpid(), refused])
    if hear() == "release":
        pins.release()
        client.close()
        say("released")
    hear()
    os._exit(0)
os.waitpid(child, 0)
"""


def test_pins_of_a_parent_outlive_its_child_and_end_with_it_while_the_child_lives(
    serving: Serving, client: kvw.Client
) -> None:
    nodes = NODES[:8]
    ns = client.open(SPACE)
    pages = pages_of(nodes, 0, LATE, PAGE_BYTES)
    eventually(lambda: not ns.store(nodes, pages, timeout_s=60).dropped, "pages are stored")
    with ClientProcess(serving.address, FORKER, space=SPACE.to_fields(), nodes=nodes) as parent:
        held, child, refused = parent.hear()
        assert held == len(nodes)
        assert refused == ["forked"] * 7
        client.evict(SPACE, 100)
        assert ns.lookup(nodes).pages == len(nodes), "pinned pages were evicted"
        parent.tell("release")  # by the child: nothing of the parent's is the child's to release
        assert parent.hear() == "released"
        client.evict(SPACE, 100)
        assert ns.lookup(nodes).pages == len(nodes), "the child released its parent's pins"
        parent.kill()
        eventually(
            lambda: client.evict(SPACE, 100) + ns.lookup(nodes).pages == 0,
            "the dead parent's pins are gone, though its child lives",
        )
        alive = Path(f"/proc/{child}/cmdline").read_bytes()
        assert alive, "the child was to outlive its parent"
        parent.tell("end")
    tally.count("client forked at a step of a store, load or pin")
