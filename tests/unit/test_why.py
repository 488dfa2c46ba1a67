"""What Why makes of the core's reports, and how `kvwarehouse why` puts it into words."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvwarehouse.cli import why as command
from kvwarehouse.cli.prompt_file import PromptFile
from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.client.why import Branches, PromptWhy, WhyRun
from kvwarehouse.daemon.ledger import NamespaceRecord
from kvwarehouse.daemon.transfer import TransferSpan
from kvwarehouse.daemon.who_has import FoundPrefixes
from kvwarehouse.daemon.why import MAX_EXPLAINED, MAX_RUNS, Why
from kvwarehouse.errors import UsageError
from kvwarehouse.types import Namespace, Tier
from kvwarehouse.wire import namespace_pb2, prefix_to_wire
from kvwarehouse.wire import warehouse_pb2 as pb

NO_BRANCHES = {"pages": 0, "more": False, "compared": 0, "common_tokens": 0, "tokens": []}


def space(number: int, **fields: Any) -> Namespace:
    return Namespace(
        model="m", weights=f"w{number}", dtype="b", layout="l/1", page_tokens=4, page_bytes=8,
        **fields,
    )  # fmt: skip


class Parts:
    """Stands in for the warehouse and the transfer: namespace i has i of the prompt's pages."""

    def __init__(self, *spaces: Namespace) -> None:
        self.records = [NamespaceRecord(at, each, 0, at) for at, each in enumerate(spaces)]
        self.branches: dict[str, Any] = NO_BRANCHES
        self.missing = [("left", "evicted")]
        self.forgotten = -1

    def namespaces(self) -> list[NamespaceRecord]:
        return self.records

    def namespace(self, namespace_id: bytes) -> NamespaceRecord:
        return next(each for each in self.records if each.space.id == namespace_id)

    def info(self, record: NamespaceRecord) -> namespace_pb2.NamespaceInfo:
        return namespace_pb2.NamespaceInfo(id=record.space.id, ordinal=record.ordinal)

    def tiers(self, whole: TransferSpan) -> Any:
        found = min(whole.pages, whole.record.ordinal)
        remote = min(1, whole.pages - found)
        rest = whole.pages - found - remote
        return np.array(
            [Tier.DRAM] * found + [Tier.REMOTE] * remote + [Tier.MISSING] * rest, np.uint8
        )

    def why(self, record: NamespaceRecord, tokens: Any, keys: Any) -> dict[str, Any]:
        if record.ordinal == self.forgotten:
            raise UsageError("it was forgotten meanwhile", code="namespace_unknown")
        found = record.ordinal
        runs = [{"first": 0, "pages": found, "state": "dram"}] if found else []
        runs += [
            {"first": found + at, "pages": 1, "state": state, "reason": reason}
            for at, (state, reason) in enumerate(self.missing)
        ]
        return {"found": found, "runs": runs, "branches": self.branches}


def asked(parts: Parts, **request: Any) -> pb.WhyResponse:
    prefix = prefix_to_wire(np.arange(4 * 40), None)
    warehouse: Any = parts
    return Why(warehouse, FoundPrefixes(warehouse, warehouse)).answer(
        pb.WhyRequest(prefix=prefix, **request)
    )


def test_namespaces_with_the_most_of_it_are_explained() -> None:
    answer = asked(Parts(*map(space, range(MAX_EXPLAINED + 3))))
    assert [each.found for each in answer.namespaces] == list(range(MAX_EXPLAINED + 2, 2, -1))
    assert answer.others == 3
    assert [each.remote_pages for each in answer.namespaces] == [1] * MAX_EXPLAINED
    assert answer.namespaces[0].pages == 40


def test_of_namespaces_that_have_nothing_the_most_alike_comes_first() -> None:
    parts = Parts(space(0), space(1), space(2))
    alike = {**NO_BRANCHES, "pages": 1, "compared": 1, "common_tokens": 3, "tokens": [1, 2, 3, 4]}
    of = {0: NO_BRANCHES, 1: alike, 2: NO_BRANCHES}
    parts.why = lambda record, tokens, keys: {  # type: ignore[method-assign, assignment, misc]
        "found": 0,
        "runs": [],
        "branches": of[record.ordinal],
    }
    answer = asked(parts)
    assert answer.namespaces[0].namespace.ordinal == 1
    assert list(answer.namespaces[0].branches.tokens) == []
    told = asked(parts, with_tokens=True)
    assert list(told.namespaces[0].branches.tokens) == [1, 2, 3, 4]


def test_namespace_that_is_forgotten_meanwhile_is_left_out() -> None:
    parts = Parts(space(0), space(1), space(2))
    parts.forgotten = 1
    assert [each.namespace.ordinal for each in asked(parts).namespaces] == [2, 0]
    with pytest.raises(UsageError) as caught:
        asked(parts, namespace_id=parts.records[1].space.id)
    assert caught.value.code == "namespace_unknown"


def test_namespace_of_the_other_kind_of_keys_is_refused_by_name() -> None:
    parts = Parts(space(0, hash_scheme="engine/1"))
    with pytest.raises(UsageError, match="block hashes") as caught:
        asked(parts, namespace_id=parts.records[0].space.id)
    assert caught.value.code == "bad_prefix"
    assert not asked(parts).namespaces


def test_runs_of_an_answer_are_bounded() -> None:
    parts = Parts(space(0))
    parts.missing = [("left", "evicted"), ("refused", "no_room")] * MAX_RUNS
    assert len(asked(parts).namespaces[0].runs) == MAX_RUNS


# --- in words


def stored(number: int = 0, **fields: Any) -> StoredNamespace:
    made = space(number, **fields)
    return StoredNamespace(made.id, made.to_fields(), number, 0, 0)


def explained(*runs: WhyRun, found: int = 0, **fields: Any) -> PromptWhy:
    pages = sum(run.pages for run in runs)
    made: dict[str, Any] = {"remote_pages": 0, "branches": Branches(), **fields}
    return PromptWhy(stored(), pages, found, runs=runs, **made)


def shown(capsys: pytest.CaptureFixture[str], each: PromptWhy) -> str:
    command._show(each, 0, PromptFile(list(range(4 * each.pages)), None))
    return capsys.readouterr().out


NOW_S = 1_800_000_000
LEFT = WhyRun(
    2, 3, "left", "evicted",
    earliest_at_ns=NOW_S * 10**9, latest_at_ns=(NOW_S + 90) * 10**9,
    first_at_ns=(NOW_S + 90) * 10**9,
    stored_at_ns=(NOW_S - 510) * 10**9, used_at_ns=(NOW_S + 50) * 10**9,
)  # fmt: skip


def test_page_that_left_is_told_with_its_life(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, explained(WhyRun(0, 2, "nvme"), LEFT, found=2))
    assert "2 of 5 pages found, 8 of 20 tokens" in text
    assert "on NVMe" in text
    first = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(NOW_S))
    last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(NOW_S + 90))
    assert f"left {first} to {last}: evicted from DRAM, to make room" in text
    assert "stored 00:10:00 before; last used 40 s before" in text
    assert "2-4" in text
    assert "8-19" in text
    earlier = shown(capsys, explained(replace(LEFT, used_earlier=True)))
    assert "last used at least 40 s before" in earlier
    never = shown(capsys, explained(replace(LEFT, used_at_ns=0, stored_at_ns=0)))
    assert "make room; not used since the daemon began" in never
    young = shown(capsys, explained(replace(LEFT, used_at_ns=0)))
    assert "stored 00:10:00 before; never used" in young


@pytest.mark.parametrize("reason", [*command._REFUSED, "a_new_one"])
def test_page_that_was_refused_is_told_with_the_reason(
    capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    at_ns = NOW_S * 10**9
    text = shown(capsys, explained(WhyRun(0, 1, "refused", reason, at_ns, at_ns)))
    assert f": {command._REFUSED.get(reason, 'a_new_one')}" in text
    assert " to " not in text.splitlines()[3].split(":", 1)[0]


def test_page_that_nobody_remembers_is_told_as_that(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not stored since the daemon began" in shown(capsys, explained(WhyRun(0, 1, "unknown")))
    since = WhyRun(0, 1, "unknown", remembered_ns=NOW_S * 10**9)
    assert "or gone before" in shown(capsys, explained(since))


@pytest.mark.parametrize(
    ("found", "branches", "said"),
    [
        (0, Branches(), "Nothing else is stored in this namespace."),
        (0, Branches(more=True), "Nothing else was found within a second in this namespace."),
        (2, Branches(), "Nothing else is stored behind the same 8 tokens."),
        (
            0,
            Branches(1, False, 1, 3),
            "1 prompt that begins otherwise is stored in this namespace. From token 3 on",
        ),
        (
            2,
            Branches(1024, True, 7, 1),
            "1,024 or more other pages are stored behind the same 8 tokens (of 7 of them, whose"
            " tokens are in DRAM). From token 9 on",
        ),
        (2, Branches(5), "it differs from them somewhere in tokens 8 to 11."),
    ],
)
def test_where_a_prompt_parts_is_told(
    capsys: pytest.CaptureFixture[str], found: int, branches: Branches, said: str
) -> None:
    runs = [WhyRun(0, found, "dram")] if found else []
    each = explained(*runs, WhyRun(found, 3, "unknown"), found=found, branches=branches)
    assert said in shown(capsys, each)


def test_tokens_of_both_are_shown_from_where_they_part(capsys: pytest.CaptureFixture[str]) -> None:
    branches = Branches(1, False, 1, 1, (4, 50, 60, 70))
    each = explained(WhyRun(0, 1, "dram"), WhyRun(1, 1, "unknown"), found=1, branches=branches)
    text = shown(capsys, each)
    assert "stored there: 50 60 70\n" in text
    assert "the prompt:   5 6 7\n" in text


def test_prompt_without_a_whole_page_and_the_remote_store(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "no whole page: one is 4 tokens" in shown(capsys, explained())
    each = explained(WhyRun(0, 1, "dram"), WhyRun(1, 3, "unknown"), found=1, remote_pages=2)
    assert "The remote store probably has pages 1 to 2." in shown(capsys, each)


def test_difference_of_namespaces_is_told_by_field() -> None:
    other = stored(1, adapter="a-lora-with-a-very-long-name-indeed")
    assert command._differs(stored(), other) == (
        "weights (w0 here, w1 there), adapter ('' here, a-lora-with-a-very-lo... there)"
    )


def test_nothing_to_ask_is_told_with_what_would_be() -> None:
    keyed = stored(hash_scheme="engine/1")
    assert "no namespace yet" in command._nothing_to_ask([], "", by_keys=False)
    assert "engine's block hashes" in command._nothing_to_ask([keyed], "", by_keys=False)
    assert "by their tokens" in command._nothing_to_ask([stored()], "m", by_keys=True)
    assert "have a salt" in command._nothing_to_ask([keyed, stored()], "", by_keys=False)
    assert "no namespace yet" in command._nothing_to_ask([stored()], "other", by_keys=True)


def test_table_that_was_cut_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    each = replace(explained(WhyRun(0, 2, "dram"), found=2), pages=5)
    assert "... and 3 pages more" in shown(capsys, each)
