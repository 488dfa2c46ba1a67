"""Traces as files: three public formats, our own, and what is wrong with them."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwarehouse.errors import UsageError
from kvwarehouse.trace.anonymize import write_recording
from kvwarehouse.trace.file import ReadOptions, read_trace
from kvwarehouse.trace.trace import Trace


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Lines (objects or text) into a file; returns its path."""

    def written(*lines: Any, name: str = "trace.jsonl") -> Path:
        path = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts) + "\n")
        return path

    return written


def mooncake(at_ms: int, ids: list[int], **more: Any) -> dict[str, Any]:
    fields = {"timestamp": at_ms, "input_length": 512 * len(ids), "output_length": 7}
    return {**fields, "hash_ids": ids, **more}


def chains(trace: Trace) -> list[list[int]]:
    return [part.tolist() for part in np.split(trace.pages, trace.ends[:-1].astype(int))]


def test_mooncake_has_milliseconds_and_blocks_of_512_tokens(write: Any) -> None:
    trace = read_trace(write(mooncake(0, [5, 9]), mooncake(1500, [5, 7, 8])))
    assert (trace.format, trace.block_tokens) == ("mooncake", 512)
    assert trace.times_s.tolist() == [0.0, 1.5]
    assert chains(trace) == [[0, 1], [0, 2, 3]]
    assert trace.input_tokens.tolist() == [1024, 1536]
    assert trace.output_tokens.tolist() == [7, 7]


def test_bailian_has_seconds_and_blocks_of_16_tokens(write: Any) -> None:
    line = {
        "chat_id": 1,
        "parent_chat_id": -1,
        "timestamp": 2.5,
        "input_length": 30,
        "output_length": 3,
        "type": "text",
        "turn": 1,
        "hash_ids": [10**15, 4],
    }
    trace = read_trace(write(line))
    assert (trace.format, trace.block_tokens) == ("bailian", 16)
    assert trace.times_s.tolist() == [2.5]
    assert trace.ids == 2


def session(*requests: Any, **more: Any) -> dict[str, Any]:
    return {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": requests, **more}


def asked(t: float, *ids: int) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": 64 * len(ids), "out": 5, "hash_ids": ids}


def test_local_ids_of_two_sessions_are_different_blocks(write: Any) -> None:
    lines = (session(asked(0, 1, 2), asked(9, 1, 2, 3)), session(asked(1, 1, 2)))
    trace = read_trace(write(*lines))
    assert (trace.format, trace.block_tokens) == ("weka", 64)
    # By time: the second session's request comes between the first one's.
    assert chains(trace) == [[0, 1], [3, 4], [0, 1, 2]]
    assert trace.times_s.tolist() == [0, 1, 9]


def test_global_ids_are_shared_and_sessions_can_start_apart(write: Any) -> None:
    lines = [session(asked(0, 1), asked(30, 1), hash_id_scope="global") for _ in range(2)]
    trace = read_trace(write(*lines), ReadOptions(session_gap_s=10))
    assert trace.ids == 1
    assert trace.times_s.tolist() == [0, 10, 30, 40]


def test_sub_agents_ask_with_blocks_of_their_session(write: Any) -> None:
    agent = {"type": "subagent", "agent_id": "a", "requests": [asked(2, 1, 7), asked(3, 1, 7)]}
    path = write(json.dumps(session(asked(0, 1), agent, asked(5, 1, 2)), indent=1), name="s.json")
    assert chains(read_trace(path)) == [[0], [0, 1], [0, 1], [0, 2]]


def test_folder_of_sessions_is_one_trace(tmp_path: Path, write: Any) -> None:
    for name in ("a.json", "b.json"):
        write(session(asked(0, 1)), name=name)
    assert read_trace(tmp_path).requests == 2


def test_recording_has_the_same_chains_and_nothing_that_was_in_the_trace(
    write: Any, tmp_path: Path
) -> None:
    ids = [10**14 + at for at in range(3)]
    trace = read_trace(write(mooncake(1000, ids[:2]), mooncake(2000, [ids[0], ids[2]])))
    names = []
    for file in ("one", "two"):
        path = tmp_path / file
        write_recording(trace, path)
        again = read_trace(path)
        assert again.format == "kvwarehouse"
        assert again.block_tokens == 512
        assert chains(again) == chains(trace)
        assert again.times_s.tolist() == [0, 1]
        text = path.read_text()
        assert not any(str(block) in text for block in ids)
        names.append(json.loads(text.splitlines()[1])["keys"])
    assert not set(names[0]) & set(names[1]), "each recording has a key of its own"
    with pytest.raises(UsageError, match="new file"):
        write_recording(trace, tmp_path / "one")


@pytest.mark.parametrize(
    "lines",
    [
        ["", *(mooncake(at, [at, at + 1]) for at in range(1001))],
        [session(asked(at, at)) for at in range(1001)],
        ["[", *(json.dumps(session(asked(at, at))) + "," for at in range(1001)), "{}]"],
        ["oops"] * 101 + [mooncake(at, [at]) for at in range(900)],
    ],
    ids=["requests", "sessions", "one-value", "format-unknown"],
)
def test_trace_from_a_pipe_is_read_from_its_first_line(write: Any, lines: list[Any]) -> None:
    # A pipe was opened to find the format, and anew to be read: its first 8 KiB were lost, with
    # --skip-bad without a word.
    file = write(*lines)
    reads, writes = os.pipe()
    writer = threading.Thread(target=_write_and_close, args=(writes, file.read_bytes()))
    writer.start()
    piped, read = (
        read_trace(path, ReadOptions(skip_bad=True)) for path in (f"/dev/fd/{reads}", file)
    )
    writer.join()
    os.close(reads)
    assert (piped.format, piped.skipped) == (read.format, read.skipped)
    assert chains(piped) == chains(read)
    assert piped.requests >= 900


def _write_and_close(descriptor: int, text: bytes) -> None:
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(text)


# --- what is wrong --------------------------------------------------------------------------------

GOOD = mooncake(5000, [1, 2])


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "a list where an object belongs"),
        ("\xff\xfe", "not JSON"),
        ({"timestamp": 6000}, "hash_ids is null"),
        ({"timestamp": 6000, "hash_ids": "12"}, 'hash_ids is "12"'),
        ({"timestamp": 6000, "hash_ids": [1, -2]}, "hash_ids has -2"),
        ({"timestamp": 6000, "hash_ids": [1, 2.5]}, "hash_ids has 2.5"),
        ({"timestamp": 6000, "hash_ids": [True]}, "hash_ids has true"),
        ({"hash_ids": [1]}, "timestamp is null"),
        ({"timestamp": "6", "hash_ids": [1]}, 'timestamp is "6"'),
        ({"timestamp": -6, "hash_ids": [1]}, "timestamp is -6"),
        ('{"timestamp": NaN, "hash_ids": [1]}', "NaN is not JSON"),
        ('{"timestamp": 1e999, "hash_ids": [1]}', "timestamp is Infinity"),
        # Larger than any float: comparing it as one ended with a traceback.
        ({"timestamp": 10**400, "hash_ids": [1]}, "timestamp is 1000"),
        ({"timestamp": 6000, "input_length": -1, "hash_ids": [1]}, "input_length is -1"),
        ({"timestamp": 6000, "output_length": 1.5, "hash_ids": [1]}, "output_length is 1.5"),
        (mooncake(4999, [1]), "the clock goes backwards, from 5 s to 4.999 s"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_line_is_refused_with_file_line_and_reason_or_counted(
    write: Any, bad: Any, reason: str
) -> None:
    path = write(GOOD, "", bad, mooncake(7000, [1, 3]))
    with pytest.raises(UsageError) as refused:
        read_trace(path)
    assert f"{path}:3: " in str(refused.value)
    assert reason in str(refused.value)
    assert "--skip-bad" in str(refused.value)
    trace = read_trace(path, ReadOptions(skip_bad=True))
    assert (trace.requests, trace.skipped) == (2, 1)
    assert ":3: " in trace.complaints[0]
    assert reason in trace.complaints[0]


def test_bad_first_line_does_not_hide_the_format(write: Any) -> None:
    path = write("oops", {"timestamp": 1, "chat_id": 3, "hash_ids": [1]})
    with pytest.raises(UsageError, match=":1: not JSON"):
        read_trace(path)
    assert read_trace(path, ReadOptions(skip_bad=True)).format == "bailian"


def test_first_few_complaints_are_kept_and_all_are_counted(write: Any) -> None:
    trace = read_trace(write(GOOD, *["x"] * 50), ReadOptions(skip_bad=True))
    assert trace.skipped == 50
    assert len(trace.complaints) == 5


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (session(asked(5, 1), asked(4, 1)), "request 2: the clock goes backwards"),
        (session({"t": 1, "type": "n"}), "request 1: hash_ids is null"),
        (session(7), "request 1: a int where an object belongs"),
        (session({"type": "subagent"}), "request 1: has no list of requests"),
        ({**session(asked(0, 1)), "hash_id_scope": "odd"}, "hash_id_scope is 'odd'"),
        ({**session(asked(0, 1)), "block_size": 0}, "block_size is 0"),
        ({**session(asked(0, 1)), "block_size": 32}, "blocks of 32 tokens among blocks of 64"),
        ({"requests": None}, "has no list of requests"),
    ],
)
def test_bad_session_is_refused_with_its_place_or_counted(
    write: Any, bad: Any, reason: str
) -> None:
    path = write(session(asked(0, 1)), bad)
    with pytest.raises(UsageError) as refused:
        read_trace(path)
    assert f"{path}:2: {reason}" in str(refused.value)
    assert read_trace(path, ReadOptions(skip_bad=True)).skipped == 1


def test_requests_behind_a_bad_one_of_a_session_are_read(write: Any) -> None:
    # A null among the requests ended its session without a word.
    agent = {"type": "subagent", "requests": [asked(2, 1, 7), None, asked(3, 1, 8)]}
    path = write(session(asked(0, 1), None, agent, asked(5, 1, 2)))
    with pytest.raises(UsageError, match="request 2: a NoneType where an object belongs"):
        read_trace(path)
    trace = read_trace(path, ReadOptions(skip_bad=True))
    assert chains(trace) == [[0], [0, 1], [0, 2], [0, 3]]
    assert trace.skipped == 2


def test_sub_agents_without_end_are_refused(write: Any) -> None:
    nested: Any = asked(0, 1)
    for _ in range(200):
        nested = {"type": "subagent", "requests": [nested]}
    with pytest.raises(UsageError, match="deep"):
        read_trace(write(session(nested)))


@pytest.mark.parametrize("text", ["", "\n\n", "x\n"])
def test_trace_without_requests_is_refused(write: Any, text: str) -> None:
    with pytest.raises(UsageError, match="no request"):
        read_trace(write(text), ReadOptions(skip_bad=True))


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")


def test_recording_without_its_head_needs_the_block_size(write: Any) -> None:
    path = write({"t": 0, "in": 5, "out": 1, "keys": ["ab", "cd"]})
    with pytest.raises(UsageError, match="--block-tokens"):
        read_trace(path, ReadOptions(form="kvwarehouse"))
    assert read_trace(path, ReadOptions(form="kvwarehouse", block_tokens=5)).ids == 2


def test_recording_of_another_version_is_refused(write: Any) -> None:
    with pytest.raises(UsageError, match=":1: a recording of version 2"):
        read_trace(write({"kvwarehouse_trace": 2}, {"t": 0, "keys": ["a"]}))


@given(st.lists(st.lists(st.integers(0, 30), max_size=6), min_size=1, max_size=20), st.randoms())
def test_any_trace_reads_back_as_the_chains_it_was_made_of(
    tmp_path_factory: pytest.TempPathFactory, asked_for: list[list[int]], order: Any
) -> None:
    if not any(asked_for):
        return
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    path.write_text(
        "".join(json.dumps(mooncake(at, ids)) + "\n" for at, ids in enumerate(asked_for))
    )
    trace = read_trace(path)
    first: dict[int, int] = {}
    expected = [[first.setdefault(block, len(first)) for block in ids] for ids in asked_for]
    assert chains(trace) == expected
