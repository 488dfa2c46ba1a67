"""One rank of several, in a process of its own: python rank_process.py JSON. It attaches, does what
the lines of its input say, and answers each with a line of JSON; pages are named by digests.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import sglang_rig.absent  # noqa: F401 - before anything of SGLang
from kvwarehouse_bench.harness.eventually import DEADLINE_S
from sglang_rig.engine import PATIENCE, Engine, Rank, join_ranks, prompt
from sglang_rig.pools import PAGE, Shape


def digests(pages: list[bytes]) -> list[str]:
    return [hashlib.sha256(page).hexdigest() for page in pages]


def answer(engine: Engine, order: dict[str, Any]) -> dict[str, Any]:
    """of: pages of the prompt, of which the first `pages` are meant; all where it is not said."""
    whole = prompt(order["prompt"], order.get("of", order["pages"]))
    tokens = whole[: order["pages"] * PAGE]
    if order["do"] == "store":
        stored, pages = engine.store(tokens, order["seed"])
        return {"stored": stored, "pages": digests(pages)}
    back = engine.prefetch(tokens)
    return {"hit": back.hit, "tokens": back.tokens, "pages": digests(back.pages)}


def main() -> None:
    given = json.loads(sys.argv[1])
    rank = Rank(Path(given["rendezvous"]), given["tp_rank"], given["tp_size"])
    join_ranks(rank)
    for module, bound in PATIENCE:
        setattr(module, bound, DEADLINE_S)
    with Engine(Shape(**given["shape"]), given["extra"]) as engine:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(engine, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
