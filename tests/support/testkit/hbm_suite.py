"""What the HBM tier must show over any device, by the public client against a real daemon: run over
the contract model of the driver by tests/integration, and over a real GPU by tests/gpu. A test
class inherits it and has the fixtures `device` (as DeviceSuite's) and `serving` (with --hbm)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import kvwarehouse as kvw
import kvwarehouse.gpu
from kvwarehouse_bench.harness.client_process import ClientProcess
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.harness.serving import Serving
from testkit.accounting import counters_of
from testkit.device_suite import (
    PAGE_BYTES,
    PAGE_TOKENS,
    PAGES,
    SPACE,
    blocks_of,
    noise,
    prompt,
)

HBM = "8MiB"
_DRIVER = ("KVW_CUDA_DRIVER", "KVW_NVRTC")

# A client of its own that loads until it is killed: {device} says what it loads into.
READER = """
import os
os.environ.update(given)
{device}
from testkit.device_suite import SPACE
from testkit.hbm_suite import load, load_until_hbm
load_until_hbm(device, client, 1, 1)
say("reading")
while True:
    load(device, client.open(SPACE), 1, 1)
"""


def core(client: kvw.Client) -> Any:
    return client.status()["core"]


def hbm(client: kvw.Client) -> Any:
    return core(client)["tiers"]["hbm"]


def serves(client: kvw.Client) -> None:
    eventually(lambda: hbm(client)["health"] == "ok", "the pool is there")


@contextmanager
def stored(serving: Serving) -> Iterator[tuple[kvw.Client, kvw.OpenNamespace]]:
    """A client of a daemon that has its pool, and prompt 1 with what seed 1 makes."""
    with serving.connect(timeout_s=60) as client:
        serves(client)
        ns = client.open(SPACE)
        assert ns.store(prompt(1), noise(1)).stored == PAGES
        yield client, ns


def by_tier(ns: kvw.OpenNamespace) -> dict[str, int]:
    """Of prompt 1."""
    return ns.lookup(prompt(1)).by_tier


def from_hbm(client: kvw.Client) -> int:
    return counters_of(client)["pages_loaded_hbm"]


def load(device: Any, ns: kvw.OpenNamespace, number: int, seed: int, pages: int = PAGES) -> None:
    """Prompt `number` as rows, compared with what `seed` made."""
    data = noise(seed, pages)
    out = device.array(np.zeros_like(data))
    tokens = [number] * (pages * PAGE_TOKENS)
    assert ns.load(tokens, out, timeout_s=60) == pages
    assert (device.read(out) == data).all()


def load_until_hbm(
    device: Any, client: kvw.Client, number: int, seed: int, pages: int = PAGES
) -> None:
    """Loads until all pages come from HBM, and once more, compared."""
    ns = client.open(SPACE)
    scratch = device.array(np.zeros((pages, PAGE_BYTES), np.uint8))
    tokens = [number] * (pages * PAGE_TOKENS)

    def all_of_them() -> bool:
        before = from_hbm(client)
        assert ns.load(tokens, scratch, timeout_s=60) == pages
        return from_hbm(client) - before == pages

    eventually(all_of_them, f"prompt {number} comes from HBM")
    before = from_hbm(client)
    load(device, ns, number, seed, pages)
    assert from_hbm(client) - before == pages


class HbmSuite:
    def test_pages_that_were_used_come_from_hbm_as_rows_and_as_blocks(
        self, device: Any, serving: Serving
    ) -> None:
        with stored(serving) as (client, ns):
            data = noise(1)
            load_until_hbm(device, client, 1, 1)
            order = [7, 0, 3, 5, 1, 6]
            cache = device.array(np.zeros((3, 8 * PAGE_BYTES // 3), np.uint8))
            before = from_hbm(client)
            assert ns.load(prompt(1), blocks_of(device, cache, order).on_device()) == PAGES
            assert from_hbm(client) - before == PAGES
            held = device.read(cache).reshape(3, 8, PAGE_BYTES // 3)
            for page, block in enumerate(order):
                assert (held[:, block].reshape(-1) == data[page]).all()
            tier = hbm(client)
            assert tier["pages"] == tier["pages_promoted"] == PAGES
            assert core(client)["loads"]["pages_from_hbm"] >= 2 * PAGES
            assert core(client)["tiers"]["dram"]["pages"] == PAGES

    def test_lookups_tell_hbm_from_dram_to_who_reads_from_there(
        self, device: Any, serving: Serving
    ) -> None:
        with stored(serving) as (client, ns), serving.connect() as host:
            assert by_tier(ns) == {"hbm": 0, "dram": PAGES, "nvme": 0, "remote": 0}
            load_until_hbm(device, client, 1, 1)
            hits = core(client)["lookups"]["pages_hit_hbm"]
            assert by_tier(ns) == {"hbm": PAGES, "dram": 0, "nvme": 0, "remote": 0}
            assert ns.tiers(prompt(1)).tolist() == [kvw.Tier.HBM] * PAGES
            assert core(client)["lookups"]["pages_hit_hbm"] == hits + 2 * PAGES
            # It loads into no device, and reads those pages in DRAM.
            assert by_tier(host.open(SPACE)) == {"hbm": 0, "dram": PAGES, "nvme": 0, "remote": 0}
            # Behind what is there, pages that are in DRAM alone.
            longer = [1] * (2 * PAGES * PAGE_TOKENS)
            assert ns.store(longer, noise(1, 2 * PAGES)).stored == PAGES
            assert ns.lookup(longer).by_tier == {
                "hbm": PAGES,
                "dram": PAGES,
                "nvme": 0,
                "remote": 0,
            }
            assert client.evict(SPACE, 100, "hbm") == PAGES
            assert by_tier(ns) == {"hbm": 0, "dram": PAGES, "nvme": 0, "remote": 0}
            client.clear(SPACE)
            assert by_tier(ns) == {"hbm": 0, "dram": 0, "nvme": 0, "remote": 0}

    def test_client_that_prepared_its_device_sees_hbm_before_its_first_load(
        self, device: Any, serving: Serving
    ) -> None:
        with stored(serving) as (client, _), serving.connect() as other:
            load_until_hbm(device, client, 1, 1)
            there = device.array(np.zeros((1, PAGE_BYTES), np.uint8))
            kvw.gpu.prepare(there.__cuda_array_interface__["data"][0], other)
            assert by_tier(other.open(SPACE)) == {"hbm": PAGES, "dram": 0, "nvme": 0, "remote": 0}

    def test_pages_that_are_cleared_are_in_no_tier(self, device: Any, serving: Serving) -> None:
        with stored(serving) as (client, ns):
            load_until_hbm(device, client, 1, 1)
            client.clear(SPACE)
            out = device.array(np.zeros_like(noise(1)))
            assert ns.load(prompt(1), out) == 0
            assert hbm(client)["pages"] == 0
            # Other bytes under the same tokens, and these alone.
            assert ns.store(prompt(1), noise(2)).stored == PAGES
            load_until_hbm(device, client, 1, 2)

    def test_copies_are_evicted_and_their_pages_stay(self, device: Any, serving: Serving) -> None:
        with stored(serving) as (client, ns):
            load_until_hbm(device, client, 1, 1)
            assert client.evict(SPACE, 100, "hbm") == PAGES
            before = from_hbm(client)
            load(device, ns, 1, 1)
            assert from_hbm(client) == before
            assert hbm(client)["left"]["operator"] == PAGES

    def test_hot_pages_displace_cold_ones_and_none_is_wrong(
        self, device: Any, serving: Serving
    ) -> None:
        with serving.connect(timeout_s=60) as client:
            serves(client)
            ns = client.open(SPACE)
            pages = 400  # of some 650 that the pool has places for
            for number in (1, 2):
                tokens = [number] * (pages * PAGE_TOKENS)
                assert ns.store(tokens, noise(number, pages), timeout_s=60).stored == pages
                load_until_hbm(device, client, number, number, pages)
            load(device, ns, 1, 1, pages)
            assert hbm(client)["left"]["demoted"] > 0
            assert hbm(client)["used_bytes"] <= hbm(client)["capacity_bytes"]

    def test_daemon_that_is_killed_leaves_its_pool_to_those_who_read_it(
        self, device: Any, serving: Serving
    ) -> None:
        with stored(serving) as (client, ns):
            load_until_hbm(device, client, 1, 1)
            serving.kill()
            before = from_hbm(client)
            load(device, ns, 1, 1)
            assert from_hbm(client) - before == PAGES
            assert by_tier(ns)["hbm"] == PAGES
            serving.start()
            # A lookup waits for 20 ms of a new daemon's hello, and else has the old memory.
            assert client.refresh(timeout_s=DEADLINE_S)
            assert by_tier(ns)["hbm"] == 0, "the new daemon begins with an empty pool"
            load_until_hbm(device, client, 1, 1)
            assert core(client)["incarnation"] == 2

    def test_client_that_is_killed_while_it_reads_leaves_nothing_behind(
        self, device: Any, serving: Serving
    ) -> None:
        with stored(serving) as (client, ns):
            given = {key: value for key, value in os.environ.items() if key in _DRIVER}
            program = READER.format(device=device.of_another_process)
            for _round in range(3):
                with ClientProcess(serving.address, program, **given) as process:
                    assert process.hear() == "reading"
                    process.kill()
                client.evict(SPACE, 100, "hbm")
                eventually(lambda: hbm(client)["leaving_places"] == 0, "its pins are gone")
                assert hbm(client)["used_bytes"] == 0
                load(device, ns, 1, 1)
