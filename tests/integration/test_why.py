"""Why a prompt's pages are found or not, asked of real daemons, by the client and the command."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.cli import main
from kvwarehouse.errors import UsageError
from kvwarehouse_bench.harness.serving import Serving

PAGE_TOKENS = 4
PAGE_BYTES = 64 * 1024
TOKENS = list(range(100, 140))
KEYS = [bytes([number]) * 32 for number in range(10)]


def space(weights: str = "w", **fields: Any) -> kvw.Namespace:
    return kvw.Namespace(
        model="m", weights=weights, dtype="f", layout="t/1",
        page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES, **fields,
    )  # fmt: skip


def rows(pages: int = 10) -> Any:
    return np.ones((pages, PAGE_BYTES), np.uint8)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="16MiB") as started:
        yield started


@pytest.fixture
def client(serving: Serving) -> Iterator[kvw.Client]:
    with serving.connect() as connected:
        yield connected


def stored_again(client: kvw.Client) -> dict[str, int]:
    counts = client.status()["core"]["stores"]["stored_again"]
    return {reason: count for reason, count in counts.items() if count}


def test_why_says_what_is_there_what_left_and_where_a_prompt_parts(client: kvw.Client) -> None:
    ns = client.open(space())
    ns.store(TOKENS, rows(), timeout_s=60)
    other = [*TOKENS[:18], *range(30)]
    (asked,) = client.why(other, space=ns, with_tokens=True).namespaces
    assert (asked.namespace.id, asked.pages, asked.found) == (ns.space.id, 12, 4)
    assert [(run.first, run.pages, run.state) for run in asked.runs] == [
        (0, 4, "dram"),
        (4, 8, "unknown"),
    ]
    assert (asked.branches.pages, asked.branches.common_tokens) == (1, 2)
    assert asked.branches.tokens == tuple(TOKENS[16:20])
    assert client.evict(ns, 3, "all") == 3
    (asked,) = client.why(TOKENS, space=ns).namespaces
    there, left = asked.runs
    assert (asked.found, there.pages, there.there) == (7, 7, True)
    assert (left.first, left.pages, left.state, left.reason) == (7, 3, "left", "operator")
    assert 0 < left.stored_at_ns <= left.earliest_at_ns <= left.latest_at_ns
    assert (asked.branches.pages, asked.branches.tokens) == (0, ())
    assert stored_again(client) == {}
    assert ns.store(TOKENS, rows(), timeout_s=60).stored == 3
    assert stored_again(client) == {"operator": 3}
    assert client.status()["core"]["lookups"]["calls"] == 0


def test_pages_that_made_room_for_others_are_told_as_evicted(
    serving: Serving, client: kvw.Client
) -> None:
    ns = client.open(space())
    ns.store(TOKENS, rows(), timeout_s=60)
    number = 0
    while ns.lookup(TOKENS).pages == 10:
        number += 1
        ns.store([number] * PAGE_TOKENS * 20, rows(20), timeout_s=60)
    (asked,) = client.why(TOKENS).namespaces
    gone = asked.runs[-1]
    assert (gone.state, gone.reason) == ("left", "evicted")
    assert gone.first + gone.pages == 10
    ns.store(TOKENS, rows(), timeout_s=60)
    counted = serving.metrics()['kvwarehouse_stored_again_pages_total{left="evicted"}']
    assert counted >= gone.pages


def test_prompt_is_asked_for_by_an_engines_keys_and_in_the_right_kind_of_namespace(
    client: kvw.Client,
) -> None:
    keyed, by_tokens = space(hash_scheme="engine/1"), space()
    client.open(keyed).store(keys=KEYS[:6], pages=rows(6), timeout_s=60)
    client.open(by_tokens)
    (asked,) = client.why(keys=KEYS).namespaces
    assert (asked.namespace.id, asked.found, asked.pages) == (keyed.id, 6, 10)
    assert (asked.branches.pages, asked.branches.compared) == (0, 0)
    (asked,) = client.why(keys=[*KEYS[:5], b"z"]).namespaces
    assert (asked.found, asked.branches.pages, asked.branches.compared) == (5, 1, 0)
    for wrong in ({"tokens": TOKENS, "space": keyed}, {"keys": KEYS, "space": by_tokens}):
        with pytest.raises(UsageError) as caught:
            client.why(**wrong)
        assert caught.value.code == "bad_prefix"
    with pytest.raises(UsageError) as caught:
        client.why(TOKENS, space=by_tokens, model="m")
    assert caught.value.code == "bad_namespace"
    with pytest.raises(UsageError) as caught:
        client.why(TOKENS, space=b"n" * 16)
    assert caught.value.code == "namespace_unknown"


def test_salted_namespace_tells_nothing_to_who_does_not_name_it(client: kvw.Client) -> None:
    salted = space(salt="user7")
    client.open(salted).store(TOKENS, rows(), timeout_s=60)
    assert client.why(TOKENS).namespaces == ()
    assert client.why(TOKENS, model="m").namespaces == ()
    (asked,) = client.why(TOKENS, space=salted).namespaces
    assert asked.found == 10
    assert "user7" not in str(asked)


def test_restart_forgets_what_left(serving: Serving) -> None:
    with serving.connect() as client:
        ns = client.open(space())
        ns.store(TOKENS, rows(), timeout_s=60)
        client.evict(ns, 4, "all")
        assert client.why(TOKENS).namespaces[0].runs[-1].state == "left"
    serving.stop()
    serving.start()
    with serving.connect() as client:
        (asked,) = client.why(TOKENS).namespaces
        assert [(run.state, run.pages) for run in asked.runs] == [("dram", 6), ("unknown", 4)]
        assert asked.runs[-1].remembered_ns == 0


# --- requests of engines


def note(request_id: str, found: int, load: int | None = None, **fields: Any) -> kvw.RequestNote:
    tokens = PAGE_TOKENS * len(KEYS)
    values = {"at_ns": time.time_ns(), **fields}
    return kvw.RequestNote(request_id, tokens, 0, found, found if load is None else load, **values)


def missing(space_of: kvw.Namespace, first: int) -> tuple[kvw.MissingPages, ...]:
    parent = KEYS[first - 1] if first else None
    return (kvw.MissingPages(space_of.id, kvw.KeyRun(KEYS[first:], first, parent)),)


def test_request_is_told_why_it_missed_though_its_pages_are_stored_by_then(
    client: kvw.Client,
) -> None:
    keyed = space(hash_scheme="engine/1")
    ns = client.open(keyed)
    ns.store(keys=KEYS, pages=rows(), timeout_s=60)
    client.evict(ns, 6, "all")
    looked_up = note("r-1", 4 * PAGE_TOKENS, missing=missing(keyed, 4))
    ns.store(keys=KEYS, pages=rows(), timeout_s=60)
    client.note_requests([looked_up, note("r-2", 40)])
    newest, first = client.requests()
    assert (newest.note.request_id, newest.missing) == ("r-2", ())
    assert first.note == replace(looked_up, missing=())
    (why,) = first.missing
    assert (why.namespace_id, why.model, why.page_tokens) == (keyed.id, "m", PAGE_TOKENS)
    assert [(run.first, run.pages, run.state, run.reason) for run in why.runs] == [
        (4, 6, "left", "operator")
    ]
    assert client.requests("r-1") == [first]
    assert client.requests("r", limit=1) == [newest]
    assert client.requests("nobody") == []
    for call in (
        lambda: client.requests(limit=0),
        lambda: client.requests(limit=1001),
        lambda: client.note_requests([note("", 0)]),
    ):
        with pytest.raises(UsageError):
            call()


# --- the command


def told(capsys: pytest.CaptureFixture[str], serving: Serving, *arguments: str) -> str:
    assert main(["why", *arguments, "--address", serving.address, "--timeout", "60"]) == 0
    return capsys.readouterr().out


def written(folder: Path, tokens: list[int]) -> str:
    path = folder / "prompt.json"
    path.write_text(json.dumps(tokens), "utf-8")
    return str(path)


def test_command_tells_of_pages_of_other_prompts_and_of_other_namespaces(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, serving: Serving, client: kvw.Client
) -> None:
    old, new = space("old"), space("new")
    client.open(old).store(TOKENS, rows(), timeout_s=60)
    client.open(new).store(TOKENS[:8], rows(2), timeout_s=60)
    prompt = written(tmp_path, [*TOKENS[:18], *range(30)])
    text = told(capsys, serving, prompt)
    assert "4 of 12 pages found, 16 of 48 tokens" in text
    assert "1 other page is stored behind the same 16 tokens. From token 18 on" in text
    assert "2 of 12 pages found" in text
    assert "It differs from the first in weights (old here, new there)." in text
    assert str(TOKENS[18]) not in text
    shown = told(capsys, serving, prompt, old.id.hex()[:12], "--show-tokens")
    assert f"stored there: {TOKENS[18]} {TOKENS[19]}\n" in shown
    assert "the prompt:   0 1\n" in shown
    named = told(capsys, serving, prompt, new.id.hex()[:12])
    assert "has more of it, 4 of 12 pages. It differs in weights (new here, old there)" in named
    client.clear(new, forget=True)
    client.evict(old, 10, "all")
    gone = told(capsys, serving, prompt, "m")
    assert "0 of 12 pages found" in gone
    assert "taken out by `kvwarehouse evict`" in gone


def test_command_reads_keys_and_standard_input_and_answers_in_json(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    serving: Serving,
    client: kvw.Client,
) -> None:
    keyed = space(hash_scheme="engine/1")
    client.open(keyed).store(keys=KEYS[:3], pages=rows(3), timeout_s=60)
    words = " ".join(key.hex() for key in KEYS)
    monkeypatch.setattr(sys, "stdin", io.StringIO(words))
    answer = json.loads(told(capsys, serving, "-", "--keys", "--json"))
    (asked,) = answer["namespaces"]
    assert asked["namespace"]["id"] == keyed.id.hex()
    assert [(run["state"], run["pages"]) for run in asked["runs"]] == [("dram", 3), ("unknown", 7)]
    assert answer["elsewhere"] == []
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 2 3 4"))
    assert "their engine's block hashes" in told(capsys, serving, "-")
    assert main(["why", "-", "nobodys", "--address", serving.address, "--timeout", "60"]) == 2
    assert "is no namespace of this warehouse" in capsys.readouterr().err


def test_command_tells_of_requests(
    capsys: pytest.CaptureFixture[str], serving: Serving, client: kvw.Client
) -> None:
    assert "No engine has said anything" in told(capsys, serving, "--recent")
    keyed = space(hash_scheme="engine/1")
    ns = client.open(keyed)
    ns.store(keys=KEYS, pages=rows(), timeout_s=60)
    ns.store(keys=[*KEYS[:2], b"other"], pages=rows(3), timeout_s=60)
    client.evict(ns, 1, "all")
    client.note_requests(
        [
            note("new", 0, missing=missing(keyed, 0)),
            note("chat-1", 36, 20, missing=missing(keyed, 9)),
            note("chat-2", 40),
        ]
    )
    lines = told(capsys, serving, "--recent", "2").splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["chat-2", "chat-1"]
    odd = "\\[/x]\x1b[2J\n[red]"
    client.note_requests([note(odd, 40, engine="vllm-1")])
    assert "vllm-1  \\[/x]\N{REPLACEMENT CHARACTER}[2J" in told(capsys, serving, "--recent", "1")
    assert "\x1b" not in told(capsys, serving, "--request", odd)
    one = told(capsys, serving, "--request", "chat-1")
    assert ": 40 tokens" in one
    assert "0-19" in one
    assert "found; computing them is faster" in one
    assert "taken out by `kvwarehouse evict`" in one
    assert len(told(capsys, serving, "--request", "chat").splitlines()) == 3
    answer = json.loads(told(capsys, serving, "--request", "new", "--json"))
    assert answer["requests"][0]["note"]["request_id"] == "new"
    where = ("--address", serving.address, "--timeout", "60")
    for wrong, said in (
        (("--request", "nobody"), "is not known here"),
        (("--request", ""), "--request is empty"),
        (("--recent", "0"), "limit 0"),
        ((), "say what is asked about"),
        (("prompt.json", "--recent"), "say what is asked about"),
    ):
        assert main(["why", *wrong, *where]) == 2
        assert said in capsys.readouterr().err
