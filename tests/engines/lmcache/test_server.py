"""LMCache's own server with the warehouse as its L2: started from its command line, used by its own
client, killed and started anew."""

from __future__ import annotations

from typing import Any

from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from lmcache_rig.server import prompt


def test_kv_comes_back_from_the_warehouse_also_to_another_server(
    launch: Any, serving: Serving, seed: int
) -> None:
    """Through both of LMCache's tiers: engine, L1, warehouse; L1 emptied; and back, into other
    blocks. The prompt's last tokens make no whole chunk, and are none."""
    server, engine = launch(serving.address)
    tokens = prompt(seed, 6, more=5)
    content = engine.fill(1, 6, seed)
    assert engine.store(tokens, 1)
    eventually(lambda: server.stored() == 6, "the chunks in the warehouse")
    engine.forget()
    assert engine.retrieve(tokens, 20) == 6
    assert engine.content(20, 6) == content
    assert server.l2()["totals"]["loaded_chunks"] == 6
    eventually(lambda: server.l2()["locked_chunks"] == 0, "all of them unlocked")
    engine.wipe(20, 7)
    engine.forget()
    assert engine.retrieve(tokens[:32] + prompt(seed + 1, 4), 20) == 2, "the prefix they share"
    assert engine.content(20, 2) != bytes(len(engine.content(20, 2)))

    second, other = launch(serving.address)
    assert other.retrieve(tokens, 9) == 6
    assert other.content(9, 6) == content
    assert second.l2()["totals"]["loaded_chunks"] == 6


def test_the_server_outlives_the_daemon_and_finds_the_next(
    launch: Any, serving: Serving, seed: int
) -> None:
    server, engine = launch(serving.address)
    tokens, content = prompt(seed, 6), engine.fill(1, 6, seed)
    assert engine.store(tokens, 1)
    eventually(lambda: server.stored() == 6, "the chunks in the warehouse")
    serving.kill()
    eventually(lambda: not server.l2()["is_healthy"], "that it is known to be gone")
    assert server.get("/healthcheck")["status"] == "healthy", "nobody restarts LMCache for it"
    more, more_content = prompt(seed + 1, 4), engine.fill(30, 4, seed + 1)
    assert engine.store(more, 30), "into the L1"
    # LMCache answers a store before its own lookups find it.
    eventually(lambda: engine.retrieve(more, 40) == 4, "what the L1 has")
    assert engine.content(40, 4) == more_content
    engine.forget()
    assert engine.retrieve(prompt(seed + 2, 4), 40) == 0
    serving.start()
    eventually(lambda: server.l2()["is_healthy"], "that the next daemon was found")
    engine.forget()
    assert engine.retrieve(tokens, 20) == 6
    assert engine.content(20, 6) == content
    assert engine.store(more, 30)
    eventually(lambda: server.stored() == 10, "a store at the next daemon")
