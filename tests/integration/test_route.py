"""WhoHas and `kvwarehouse route` over several real daemons."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.cli import main
from kvwarehouse.client.routing import Question, who_has
from kvwarehouse_bench.harness.eventually import longer_bounds
from kvwarehouse_bench.harness.serving import Serving

PAGE_TOKENS = 4
PAGE_BYTES = 4096


def space(model: str = "m", **fields: Any) -> kvw.Namespace:
    return kvw.Namespace(
        model=model, weights="w", dtype="f", layout="t/1",
        page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES, **fields,
    )  # fmt: skip


def store(serving: Serving, tokens: list[int], wanted: kvw.Namespace | None = None) -> None:
    pages = np.zeros((len(tokens) // PAGE_TOKENS, PAGE_BYTES), np.uint8)
    with serving.connect() as client:
        client.open(wanted or space()).store(tokens, pages, timeout_s=60)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Serving]]:
    with (
        Serving(tmp_path / "a", name="a", nvme_capacity="64MiB") as a,
        Serving(tmp_path / "b", name="b", nvme_capacity="64MiB") as b,
    ):
        yield [a, b]


def test_each_warehouse_says_what_it_has_and_in_which_tier(hosts: list[Serving]) -> None:
    a, b = hosts
    prompt = list(range(40))
    store(a, prompt[:20])
    store(b, prompt)
    with b.connect() as client:
        client.flush(timeout_s=30)
        client.evict(space(), pages=4, tiers="dram")
    first, second = who_has([a.address, b.address], Question(tokens=prompt), timeout_s=30)
    assert (first.address, first.name, first.problem) == (a.address, "a", "")
    assert first.holding is not None
    assert second.holding is not None
    assert (first.holding.tokens, first.holding.dram_tokens) == (20, 20)
    assert (second.holding.tokens, second.holding.dram_tokens) == (40, 24)
    assert second.holding.namespace_id == space().id
    assert first.warehouse_id != second.warehouse_id


def test_asking_counts_as_no_lookup(hosts: list[Serving]) -> None:
    store(hosts[0], list(range(8)))
    who_has([hosts[0].address], Question(tokens=list(range(8))), timeout_s=30)
    assert hosts[0].metrics()["kvwarehouse_lookups_total"] == 0


def test_namespaces_are_chosen_by_model_id_and_kind_of_keys(hosts: list[Serving]) -> None:
    a, _ = hosts
    keyed = space("k", hash_scheme="engine/1")
    store(a, list(range(16)), space("big"))
    store(a, list(range(8)), space("small"))
    with a.connect() as client:
        keys = [b"x" * 32, b"y" * 32, b"z" * 32]
        rows = np.zeros((2, PAGE_BYTES), np.uint8)
        client.open(keyed).store(keys=keys[:2], pages=rows, timeout_s=60)

    def held(**question: Any) -> int:
        (answer,) = who_has([a.address], Question(**question), timeout_s=30)
        assert not answer.problem, answer.problem
        return answer.holding.tokens if answer.holding else -1

    tokens = list(range(16))
    assert held(tokens=tokens) == 16
    assert held(tokens=tokens, model="small") == 8
    assert held(tokens=tokens, namespace_id=space("small").id) == 8
    assert held(tokens=tokens, model="nobody's") == -1
    assert held(keys=keys) == 2 * PAGE_TOKENS
    assert held(tokens=tokens, model="k") == -1  # its pages are found by keys alone
    assert held(keys=keys, model="big") == -1
    assert held(keys=[b"q" * 32, *keys]) == 0


@pytest.mark.parametrize("question", [{}, {"model": "m"}])
def test_salted_namespace_tells_nothing_to_who_does_not_name_it(
    hosts: list[Serving], question: dict[str, str]
) -> None:
    """Incident: whoever did not know a user's salt was told how much of a prompt that user had
    asked, which is what the salt is there to hide."""
    a, _ = hosts
    prompt = list(range(40))
    store(a, prompt, space(salt="user7"))
    (answer,) = who_has([a.address], Question(tokens=prompt, **question), timeout_s=30)
    assert (answer.problem, answer.holding) == ("", None)
    store(a, prompt[:8])
    (answer,) = who_has([a.address], Question(tokens=prompt, **question), timeout_s=30)
    assert answer.holding is not None
    assert answer.holding.tokens == 8
    named = Question(tokens=prompt, namespace_id=space(salt="user7").id)
    (answer,) = who_has([a.address], named, timeout_s=30)
    assert answer.holding is not None
    assert answer.holding.tokens == 40


def test_warehouse_that_hangs_is_left_out_within_the_bound(hosts: list[Serving]) -> None:
    a, b = hosts
    store(b, list(range(8)))
    a.pause()
    try:
        for bound_s in longer_bounds():
            answers = who_has(
                [a.address, b.address], Question(tokens=list(range(8))), timeout_s=bound_s
            )
            assert answers[0].problem
            if not answers[1].problem:
                break
        assert not answers[1].problem
    finally:
        a.resume()


def routed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["route", *arguments, "--timeout", "30", "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_route_prints_the_best_and_why(
    hosts: list[Serving], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = hosts
    prompt = list(range(32))
    store(a, prompt[:8])
    store(b, prompt)
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(prompt))
    both = ["--address", a.address, "--address", b.address]
    status, found = routed(capsys, str(file), *both)
    assert (status, found["route_to"]) == (0, b.address)
    assert [c["tokens"] for c in found["candidates"]] == [32, 8]
    assert found["candidates"][0]["score"] == pytest.approx(32 * 0.9)
    busy = ["--requests", f"{b.address}=1", "--cost-request", "100"]
    assert routed(capsys, str(file), *both, *busy)[1]["route_to"] == a.address
    assert main(["route", str(file), *both, "--timeout", "30"]) == 0
    assert f"route to {b.address}" in capsys.readouterr().out


def test_route_leaves_out_who_is_gone_or_drains_and_says_so(
    hosts: list[Serving],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = hosts
    nowhere = f"unix://{tmp_path}/nobody.sock"
    addresses = [item for each in (a.address, b.address, nowhere) for item in ("--address", each)]
    with a.connect() as client:
        client.drain(timeout_s=30)

    def ask() -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("1 2,3 4"))
        return routed(capsys, "-", *addresses)

    status, found = ask()
    assert (status, found["route_to"]) == (0, b.address)
    assert {out["address"]: out["problem"] for out in found["left_out"]}.keys() == {
        a.address,
        nowhere,
    }
    b.kill()
    status, found = ask()
    assert (status, found["route_to"]) == (3, None)


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        ("[1, 2", [], "is no JSON list"),
        ("one two", [], "something other than token ids"),
        ("xyz", ["--keys"], "not hex"),
        ("1", ["--requests", "/a=many"], "is not ADDRESS=N"),
        ("1", ["--cost-nvme", "2"], "use 0 (free) to 1"),
        ("1", ["--namespace", "q"], "not hex"),
        ("1", ["--timeout", "inf"], "timeout_s"),
    ],
)
def test_route_refuses_what_makes_no_sense(
    text: str, flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt"
    file.write_text(text)
    assert main(["route", str(file), "--address", "/a", *flags]) == 2
    assert said in capsys.readouterr().err
