"""Every measure of `kvwarehouse bench`, at sizes that say nothing: that each runs against a real
daemon, measures both of its sides, and can be judged. No time is asserted."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvwarehouse import core
from kvwarehouse.errors import UsageError, WarehouseError
from kvwarehouse_bench.micro import MEASURES, memory, restart, run_measure, soak
from kvwarehouse_bench.micro.exchange import PAGES
from kvwarehouse_bench.micro.figures import MET, MISSED, Curve, Figure, Result
from kvwarehouse_bench.micro.filled import filled_daemon
from kvwarehouse_bench.micro.options import (
    PAGE_TOKENS,
    PIECES,
    Options,
    Sizes,
    open_bench,
    paged_cache,
    prompt,
)
from kvwarehouse_bench.micro.private import private_daemon
from kvwarehouse_bench.micro.process import private_bytes, resident_bytes
from kvwarehouse_bench.micro.socket_session import (
    NONE_GRANTED,
    Granted,
    SocketSession,
    exchange_bytes,
    exchange_message,
    granted_by,
    reservations,
)

SIZES = Sizes(
    page_bytes=(64 << 10, 256 << 10),
    remote_page_bytes=(4 << 10, 64 << 10),
    filter_keys=20_000,
    stored=(500, 2_000),
    indexed=(100, 1_000),
    looked_up=(16, 64),
    loaded=(1, 10),
    sessions=(1, 3),
    stepped=3_000,
    turn_s=0.2,
    idle_s=0.05,
    soak_minutes=0.05,
)
# What they have beside the figures that every measure has.
CURVES = {
    "load": 4,
    "store": 2,
    "remote": 2,
    "memory": 3,
    "growth": 2 + 2 + 3 + 3 + 4,
}


class Small(Options):
    """With arenas just large enough: every page of one is written before a round is timed."""

    @property
    def dram_bytes(self) -> int:
        return 128 << 20


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Small(2, 64 << 10, 32, str(tmp_path), SIZES)


@pytest.mark.parametrize("name", MEASURES)
def test_measure_yields_figures_that_can_be_judged(
    name: str, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "ARENA_PAGES", 2_000)
    monkeypatch.setattr(restart, "NVME_PAGES", 3_000)
    result = run_measure(name, options)
    figures = [each for each in result.found if isinstance(each, Figure)]
    curves = [each for each in result.found if isinstance(each, Curve)]
    assert figures
    assert len({each.name for each in figures}) == len(figures)
    assert len(curves) == CURVES.get(name, 0)
    for each in figures:
        assert math.isfinite(each.value)
        assert each.value >= 0
        assert each.limit is None or each.limit >= 0
        assert (each.verdict in (MET, MISSED)) == bool(each.goal)
    for curve in curves:
        assert len(curve.points) == 2
        assert curve.points[0][0] < curve.points[1][0]
    assert Result.of_json(result.as_json()).found == result.found


def test_goals_of_loads_are_by_page_size() -> None:
    sizes = Sizes(page_bytes=(64 << 10, 256 << 10, 2 << 20), loaded=(1, 2))
    small = Small(2, 2 << 20, 2, None, sizes)
    goals = [each.goal for each in run_measure("load", small).found if isinstance(each, Figure)]
    assert goals[:4] == ["", "", "", ""]
    assert goals[4:8] == ["ratio 0.7 or more", ""] * 2
    assert goals[8:] == ["ratio 0.75 or more", "ratio 0.9 or more"] * 2


def test_paged_cache_has_each_page_in_pieces_of_its_own_all_over() -> None:
    cache = paged_cache(4, PIECES * 100)
    pages = [bytes([1 + at]) * (PIECES * 100) for at in range(4)]
    for at, page in enumerate(pages):
        cache.write(at, memoryview(page))
    assert [bytes(cache.read(at)) for at in range(4)] == pages


def test_exchange_seals_what_it_was_granted_and_reserves_more() -> None:
    with private_daemon({"dram": 64 << 20}) as (daemon, client):
        space_id = open_bench(client, 4096).space.id

        def asked(granted: Granted, seed: int, pages: int = PAGES) -> bytes:
            tokens = prompt(pages, seed=seed)
            keys = core.chain_keys(bytes(core.SECRET_BYTES), space_id, tokens, PAGE_TOKENS)
            return exchange_message(space_id, granted, reservations(keys, tokens))

        def slots() -> tuple[int, int]:
            dram = client.status()["core"]["tiers"]["dram"]
            return dram["reserved_slots"], dram["pages"]

        with SocketSession(daemon.socket) as session:
            granted = granted_by(session.ask(asked(NONE_GRANTED, 1)), 0)
            assert slots() == (PAGES, 0)
            request = asked(granted, 2)
            reply = session.ask(request)
            assert (len(request), len(reply)) == exchange_bytes(PAGES)
            session.give_back(granted_by(reply, PAGES))
            assert slots() == (0, PAGES)
            again = session.ask(asked(granted, 3, pages=0))
            with pytest.raises(WarehouseError, match=f"{PAGES} of the bench's {PAGES} seals"):
                granted_by(again, PAGES)


def test_exchange_that_is_refused_says_why() -> None:
    one = reservations(np.ones((1, 16), np.uint8), prompt(1, seed=1))
    with private_daemon({"dram": 64 << 20}) as (daemon, _), SocketSession(daemon.socket) as session:
        reply = session.ask(exchange_message(bytes(16), NONE_GRANTED, one))
        with pytest.raises(WarehouseError, match="namespace"):
            granted_by(reply, 0)


def test_session_without_a_daemon_is_an_error_at_once(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nobody:
        nobody.bind(str(tmp_path / "s"))
    with pytest.raises(OSError, match="refused"):
        SocketSession(str(tmp_path / "s"))


def test_memory_beside_the_payload_counts_index_and_slots_as_they_lie_on_tmpfs() -> None:
    with filled_daemon(1_000, index_pages=2_000) as filled:
        daemon = filled.daemon
        assert filled.pages == 1_000
        [index] = daemon.arena_dir.glob("index.*")
        assert memory.shared_bytes(daemon) == {
            "index": index.stat().st_blocks * 512,
            "slots": (daemon.arena_dir / "slots").stat().st_blocks * 512,
        }
        assert index.stat().st_size >= 1_000 * 64


# Does nothing but what it is told: a process of tests gives memory back, and takes some, meanwhile.
_HOLDS_MEMORY = """
import mmap, sys
size, path = int(sys.argv[1]), sys.argv[2]
own = mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
opened = open(path, "r+b")
mapped = mmap.mmap(opened.fileno(), size)
print("ready", flush=True)
sys.stdin.readline()
own.write(b"1" * len(own))
sum(mapped[::4096])
print("done", flush=True)
sys.stdin.readline()
"""


def test_memory_of_a_process_is_told_apart_by_what_backs_it(tmp_path: Path) -> None:
    size = 8 << 20
    file = tmp_path / "mapped"
    file.write_bytes(bytes(size))
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS_MEMORY, str(size), str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        private, resident = private_bytes(holder.pid), resident_bytes(holder.pid)
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "done\n"
        assert private_bytes(holder.pid) - private >= 2 * size
        assert resident_bytes(holder.pid) - resident >= 3 * size
        without = resident_bytes(holder.pid, (str(tmp_path),))
        assert resident_bytes(holder.pid) - without == size
        holder.stdin.close()


def test_index_costs_refuse_counts_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="0 entries"):
        core.index_costs([0], 1)
    [one] = core.index_costs([100], 2)
    assert (one["entries"], len(one["hit_ns"]), len(one["replace_ns"])) == (100, 2, 2)


def test_presence_costs_refuse_counts_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="1 objects"):
        core.presence_costs(1, 1)
    cost = core.presence_costs(1_000_000, 2)
    assert cost["objects"] == 1_000_000
    assert [len(cost[name]) for name in ("index_ns", "pages_ns", "runs_ns", "absent_ns")] == [2] * 4


def test_soak_that_grew_misses_its_goal() -> None:
    memory_of = {"daemon: memory, MiB": 50.0, "clients: memory, MiB": 60.0}
    found = {
        "done": {"pages stored": 60},
        "warm": memory_of,
        "end": memory_of,
        "grew": ["sessions"],
    }
    assert soak.figures(found, 1.0)[0].verdict == MISSED
    assert soak.figures({**found, "grew": []}, 1.0)[0].verdict == MET
