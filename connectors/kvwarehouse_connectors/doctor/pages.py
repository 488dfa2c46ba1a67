"""How large a model's pages are, as `kvwarehouse size` says, and whether they fit the daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

from kvwarehouse import format_size as size
from kvwarehouse.host import Finding, fail, ok, skip, warn
from kvwarehouse_connectors.doctor.facts import EngineFacts, Facts, PageFacts
from kvwarehouse_connectors.doctor.warehouse import SMALL_DRAM_BYTES

_SIZE = (sys.executable, "-P", "-m", "kvwarehouse", "size", "--json")
_TIMEOUT_S = 60.0
# Fewer tokens of a model than this are a handful of conversations.
_FEW_TOKENS = 32_768
_NO_ENGINE = EngineFacts()


def page_facts(
    model: str, page_tokens: int, kv_dtype: str, engine: EngineFacts = _NO_ENGINE
) -> PageFacts:
    """model: a config.json, the folder it is in, or a name that `kvwarehouse size` knows; "" for
    none. kv_dtype: "" for 16 bits. engine: that of a command line, if one was given."""
    facts = PageFacts(model=model, tokens=page_tokens)
    if not model:
        return facts
    asked = ["--config" if os.path.exists(model) else "--model", model]
    asked += ["--page-tokens", str(page_tokens), *(("--dtype", kv_dtype) if kv_dtype else ())]
    step = engine.command_step_tokens
    if step:
        asked += ["--context", str(step)]
        asked += ["--tp", str(engine.command_tp), "--pp", str(engine.command_pp)]
    try:
        ended = subprocess.run(
            [*_SIZE, *asked], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if ended.returncode:
            return replace(facts, error=ended.stderr.strip())
        told = json.loads(ended.stdout)
        share = told["rank_bytes_per_token"] / told["bytes_per_token"]
        return replace(
            facts,
            page_bytes=int(told["page_bytes"]),
            step_bytes=int(told["contexts"][0]["held_bytes"] * share) if step else 0,
            kinds=len(told["layers"]),
        )
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        return replace(facts, error=f"`kvwarehouse size` did not say: {error}")


def check_pages(facts: Facts, page_option: str) -> Iterator[Finding]:
    """page_option: where the engine has the tokens of a page."""
    page, check = facts.page, "pages"
    if not page.model:
        yield skip(check, "no model was given: --model says whether its pages fit the daemon")
        return
    if page.error:
        yield fail(check, page.error, "give --model a config.json, its folder, or a known name")
        return
    shown = f"{page.tokens:,} tokens are {size(page.page_bytes)}"
    most, room = _of_daemon(facts)
    if not most:
        yield skip(check, f"{shown}; no daemon was reached that says what fits")
        return
    fix = (
        f"fewer tokens a page ({page_option}), or a daemon with a larger --dram (and"
        " --nvme-capacity) and a new --arena-dir"
    )
    if page.page_bytes > most and page.kinds == 1:
        yield fail(check, f"{shown}; the largest that fits is {size(most)}", fix)
        return
    if page.page_bytes > most:
        what = f"{shown} with layers of all {page.kinds} kinds; the largest page is {size(most)}"
        yield warn(check, f"{what}: whether each kind's own page fits shows at the start", fix)
        return
    tokens = room * page.tokens // page.page_bytes
    held = f"{shown}, {size(most)} would fit; the DRAM tier holds {tokens:,} tokens"
    if tokens < _FEW_TOKENS and room >= SMALL_DRAM_BYTES:  # else that has been said
        yield warn(check, held, "start the daemon with more --dram")
    else:
        yield ok(check, held)


def _of_daemon(facts: Facts) -> tuple[int, int]:
    """(the largest page, bytes of the DRAM tier); 0 where the daemon does not say."""
    core = facts.daemon.status.get("core")
    if not isinstance(core, dict):
        return 0, 0
    dram = core.get("tiers", {}).get("dram", {})
    return int(core.get("page_bytes_max", 0)), int(dram.get("capacity_bytes", 0))
