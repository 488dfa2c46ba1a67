"""An agent whose tool call takes ten minutes finds its context in DRAM, whatever others store."""

from __future__ import annotations

import random

import numpy as np

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from vllm_rig.compare import assert_same
from vllm_rig.messages import Ask
from vllm_rig.pair import BLOCK, Pair, blocks, hit, prompt

_PAGES = 1024


def fill_dram(pair: Pair) -> None:
    """Sessions of another model whose pages share slabs with it, more than DRAM has room for."""
    client = pair.stored_pages.client
    (keep,) = client.keeps().keeps
    (served,) = [each.fields for each in client.namespaces() if each.id == keep.namespace_id]
    space = kvw.Namespace(
        model="others", weights="w", dtype="b", layout="l/1", page_tokens=BLOCK,
        page_bytes=int(served["page_bytes"]), shards=int(served["shards"]),
    )  # fmt: skip
    ns = client.open(space)
    pages = np.ones((_PAGES, space.page_bytes), np.uint8)
    room = client.status()["core"]["tiers"]["dram"]["capacity_bytes"]
    for session in range(2 * room // pages.nbytes):
        tokens = np.arange(_PAGES * BLOCK) + session * _PAGES * BLOCK
        for shard in range(space.shards):
            assert ns.store(tokens, pages, shard, timeout_s=60).stored > 0
    client.clear(ns, forget=True)


def test_what_an_agent_wished_to_keep_is_in_dram_when_it_comes_back(
    pair: Pair, rng: random.Random
) -> None:
    client = pair.stored_pages.client
    wish = {"kvwarehouse.keep_s": 600, "kvwarehouse.keep_as": "agent"}
    agent, other = Ask(prompt(rng, 640), kv=wish), Ask(prompt(rng, 640))
    said, _ = pair.stored(agent, other)
    eventually(
        lambda: [each.pages for each in client.keeps().keeps] == [blocks(agent)],
        "all that the agent's request stored is kept",
    )
    fill_dram(pair)
    space_id = client.keeps().keeps[0].namespace_id
    in_dram = [page for page in client.pages(space_id) if "dram" in page.tiers]
    assert len(in_dram) == blocks(agent), "what nobody keeps has left"

    before = pair.counted("hit_tokens_dram")
    warm = pair.reloaded(Ask(agent.tokens))
    assert warm.cached == hit(agent)
    assert_same(said, warm)
    eventually(lambda: pair.counted("hit_tokens_dram") == before + hit(agent), "it was in DRAM")

    # The next turn goes on from what was generated, and takes the first one's place.
    history = agent.tokens + said.tokens
    turn = Ask(history + prompt(rng, 2 * BLOCK), kv=wish)
    pair.stored(turn, new=blocks(turn) - blocks(agent))
    eventually(
        lambda: [each.pages for each in client.keeps().keeps] == [blocks(turn)],
        "the longer one is kept in its place",
    )
    assert client.remove_all_keeps() == 1
