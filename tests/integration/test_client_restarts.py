"""A client on the daemon's host, over the daemon's ends and beginnings."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.embedded import PrivateDaemon

SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=65536
)
TOKENS = range(40)
MORE = range(1000, 1040)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[PrivateDaemon]:
    settings = {"dram": "128MiB", "nvme_dir": str(tmp_path / "nvme"), "nvme_capacity": "1GiB"}
    with PrivateDaemon(settings) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[kvw.Client]:
    with kvw.connect(daemon.address) as client:
        yield client


@pytest.fixture
def pages(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (10, 65536), dtype=np.uint8)


def check_loaded(ns: kvw.OpenNamespace, pages: Any, tokens: Any = TOKENS) -> None:
    out = np.zeros_like(pages)
    assert ns.load(tokens, out, timeout_s=30) == len(pages)
    assert np.array_equal(out, pages)


def test_connecting_without_a_daemon_fails_at_once_and_says_how_to_start_one() -> None:
    with pytest.raises(kvw.TransportError, match=r"kvwarehouse serve --socket /tmp/none\.sock"):
        kvw.connect("unix:///tmp/none.sock", timeout_s=60)


def test_loads_go_on_from_shared_memory_while_there_is_no_daemon(
    daemon: PrivateDaemon, client: kvw.Client, pages: Any
) -> None:
    ns = client.open(SPACE)
    ns.store(TOKENS, pages)
    daemon.kill()
    assert ns.lookup(TOKENS).pages == 10
    check_loaded(ns, pages)
    with pytest.raises(kvw.TransportError):
        ns.store(MORE, pages)


def test_client_stores_and_loads_again_after_the_daemon_was_killed(
    daemon: PrivateDaemon, client: kvw.Client, pages: Any
) -> None:
    ns = client.open(SPACE)
    ns.store(TOKENS, pages)
    daemon.kill()
    daemon.start()
    check_loaded(ns, pages)
    assert ns.store(MORE, pages).stored == 10
    check_loaded(ns, pages, MORE)
    assert client.status()["core"]["incarnation"] > 1


def test_new_client_finds_the_pages_of_a_killed_daemon(
    daemon: PrivateDaemon, client: kvw.Client, pages: Any
) -> None:
    client.open(SPACE).store(TOKENS, pages)
    daemon.kill()
    daemon.start()
    with kvw.connect(daemon.address, verify="boundary") as another:
        check_loaded(another.open(SPACE), pages)


def test_stop_drains_and_exits_0(daemon: PrivateDaemon, client: kvw.Client, pages: Any) -> None:
    client.open(SPACE).store(TOKENS, pages)
    assert daemon.stop() == 0


def test_pages_come_back_from_nvme_when_the_arena_is_gone(
    daemon: PrivateDaemon, client: kvw.Client, pages: Any
) -> None:
    client.open(SPACE).store(TOKENS, pages)
    client.close()
    daemon.stop()
    shutil.rmtree(daemon.arena_dir)
    daemon.start()
    with kvw.connect(daemon.address) as another:
        ns = another.open(SPACE)
        assert ns.lookup(TOKENS).by_tier == {"hbm": 0, "dram": 0, "nvme": 10, "remote": 0}
        check_loaded(ns, pages)
        assert ns.lookup(TOKENS).by_tier == {"hbm": 0, "dram": 10, "nvme": 0, "remote": 0}


def test_pages_evicted_from_dram_are_promoted_by_a_load(client: kvw.Client, pages: Any) -> None:
    ns = client.open(SPACE)
    ns.store(TOKENS, pages)
    flushed = client.flush()
    assert (flushed.flushed, flushed.pending) == (10, 0)
    assert client.evict(SPACE, 10) == 10
    assert ns.lookup(TOKENS).by_tier == {"hbm": 0, "dram": 0, "nvme": 10, "remote": 0}
    assert ns.load(TOKENS, np.zeros_like(pages), timeout_s=0) == 0
    check_loaded(ns, pages)


def test_client_finds_itself_in_a_new_warehouse_when_all_is_gone(
    daemon: PrivateDaemon, client: kvw.Client, pages: Any, tmp_path: Path
) -> None:
    ns = client.open(SPACE)
    ns.store(TOKENS, pages)
    daemon.kill()
    shutil.rmtree(daemon.arena_dir)
    shutil.rmtree(tmp_path / "nvme")
    daemon.start()
    assert ns.store(TOKENS, pages).stored == 10
    check_loaded(ns, pages)


def test_cleared_pages_stay_gone_over_a_restart(
    daemon: PrivateDaemon, client: kvw.Client, pages: Any
) -> None:
    ns = client.open(SPACE)
    ns.store(TOKENS, pages)
    client.flush()
    assert client.clear(SPACE) == 10
    daemon.kill()
    daemon.start()
    assert ns.lookup(TOKENS).pages == 0


def test_pins_survive_the_daemon(daemon: PrivateDaemon, client: kvw.Client, pages: Any) -> None:
    ns = client.open(SPACE)
    ns.store(TOKENS, pages)
    pins = ns.pin(TOKENS)
    daemon.kill()
    daemon.start()
    client.evict(SPACE, 10)
    assert ns.lookup(TOKENS).by_tier["dram"] == 10
    pins.release()
