"""Parts of the LMCache connector that need neither LMCache nor a daemon."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from dataclasses import replace
from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import DEADLINE_S
from kvwarehouse_connectors.lmcache import locks
from kvwarehouse_connectors.lmcache.chunks import ChunkLayout, page_key
from kvwarehouse_connectors.lmcache.identity import Spaces, Weights, weights_of
from kvwarehouse_connectors.lmcache.loading import Loading
from kvwarehouse_connectors.lmcache.locks import Locks
from kvwarehouse_connectors.lmcache.results import TaskResults
from kvwarehouse_connectors.lmcache.settings import Settings, read_settings
from kvwarehouse_connectors.lmcache.workers import Workers
from lmcache_model.objects import Key

HASH = hashlib.sha256(b"chunk").digest()
LAYOUT = ChunkLayout(((2, 4, 16, 64),), ("bfloat16",), 16384)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("adress", "unix:///x", "is unknown; known are address"),
        ("mode", "append", "is not one of read_write, read_only, write_only"),
        ("weights", 7, "is not an object of model to text"),
        ("weights", {"m": ""}, "give both of them text"),
        ("checkpoints", "/models/m", "is not an object of model to text"),
        ("trust_model_names", "yes", "is not true or false"),
        ("load_timeout_s", 300, "is out of range"),
        ("store_queue_bytes", 7, "is out of range"),
    ],
)
def test_bad_setting_is_refused_by_name_with_what_is_supported(
    name: str, value: Any, told: str
) -> None:
    with pytest.raises(kvw.UsageError) as caught:
        read_settings({f"kvwarehouse.{name}": value})
    assert caught.value.code == "bad_setting"
    assert f"kvwarehouse.{name} = {value!r}" in str(caught.value)
    assert told in str(caught.value)


def test_a_setting_without_the_prefix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(kvw.UsageError, match=r"'address' is unknown; .* begin with 'kvwarehouse.'"):
        read_settings({"address": "unix:///x"})
    monkeypatch.setenv("KVW_ADDRESS", "unix:///run/given.sock")
    assert read_settings({}) == Settings(address="unix:///run/given.sock")


def test_weights_are_required_or_waived_with_a_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    with pytest.raises(kvw.UsageError) as caught:
        weights_of(Settings())
    assert caught.value.code == "no_weights"
    assert weights_of(Settings(weights="v1")).of("anything") == "v1"
    assert not caplog.text
    waived = weights_of(Settings(weights={"a": "v1"}, trust_model_names=True))
    assert "trust_model_names" in caplog.text
    assert waived.of("a") == "v1"
    assert waived.of("b") not in ("", "v1")
    assert weights_of(Settings(weights={"a": "v1"})).of("b") == ""
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights" * 99)
    given = weights_of(Settings(checkpoints={"a": str(tmp_path)}))
    assert given.of("a") == kvw.fingerprint(str(tmp_path))
    with pytest.raises(kvw.UsageError, match="adapter_params") as caught:
        weights_of(Settings(checkpoints={"a": "no/such-model-here"}))
    assert caught.value.code == "no_weights"


def test_every_field_of_a_key_and_a_layout_tells_namespaces_or_keys_apart() -> None:
    spaces = Spaces(Weights({}, "w"), "s", "0.5.6")
    key = Key(HASH)
    layouts = [
        LAYOUT,
        replace(LAYOUT, shapes=((2, 4, 64, 16),)),
        replace(LAYOUT, dtypes=("float16",)),
        ChunkLayout(((1, 4, 16, 64), (1, 4, 16, 64)), ("bfloat16", "bfloat16"), 16384),
    ]
    made = [spaces.space(key, layout) for layout in layouts]
    made += [
        spaces.space(replace(key, **other), LAYOUT)
        for other in ({"model_name": "x"}, {"kv_rank": 0x02000200}, {"object_group_id": 1})
    ]
    made += [
        Spaces(Weights({}, "v"), "s", "0.5.6").space(key, LAYOUT),
        Spaces(Weights({}, "w"), "t", "0.5.6").space(key, LAYOUT),
        Spaces(Weights({}, "w"), "s", "0.5.7").space(key, LAYOUT),
    ]
    assert None not in made
    assert len({space.id for space in made if space}) == len(made)
    salts = ["", "a", "b", "ab"]
    keys = {page_key(replace(key, cache_salt=salt)) for salt in salts}
    keys |= {page_key(Key(HASH * 3)), page_key(Key(HASH * 3, cache_salt="a"))}
    keys |= {page_key(Key(b"b" + HASH, cache_salt="a")), page_key(Key(HASH, cache_salt="ab"))}
    assert len(keys) == len(salts) + 3
    assert page_key(key) == HASH
    assert page_key(Key(HASH[:8])) is None


def test_kinds_of_chunks_are_bounded_and_models_without_weights_are_refused_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spaces = Spaces(Weights({"known": "w"}), "", "0.5.6")
    for _ in range(3):
        assert spaces.space(Key(HASH, model_name="other"), LAYOUT) is None
    assert caplog.text.count("nothing names its weights") == 1
    made = [
        spaces.space(Key(HASH, model_name="known", object_group_id=group), LAYOUT)
        for group in range(300)
    ]
    assert made[254] is not None
    assert made[255:] == [None] * 45
    assert caplog.text.count("kinds of chunks") == 1
    assert spaces.space(Key(HASH, model_name="known", object_group_id=7), LAYOUT) is made[7]


class Pin:
    def __init__(self) -> None:
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


def test_a_pin_ends_with_the_last_of_its_locks() -> None:
    table, first, second = Locks(10), Pin(), Pin()
    assert table.take("abc", [first])
    assert table.take("a", [second])
    table.give_back("ab")
    assert (first.releases, second.releases, table.count("a")) == (0, 0, 1)
    table.give_back("c")
    assert (first.releases, second.releases) == (1, 0)
    table.give_back("aab")
    assert (first.releases, second.releases, table.total) == (1, 1, 0)


def test_locks_that_are_never_given_back_end_and_later_ones_stay() -> None:
    now = [0.0]
    table, old, new = Locks(10, lambda: now[0]), Pin(), Pin()
    table.take("ab", [old])
    now[0] = 5.0
    table.take("bc", [new])
    table.give_back("a")
    now[0] = 9.9
    assert table.expire() == 0
    now[0] = 10.0
    assert table.expire() == 1
    assert (old.releases, new.releases, table.total) == (1, 0, 2)
    table.give_back("bc")
    assert (new.releases, table.total, table.count("b")) == (1, 0, 0)
    assert table.expire() == 0


def test_locks_are_bounded_and_pins_over_the_bound_are_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locks, "_MOST_LOCKS", 3)
    table, kept, over = Locks(10), Pin(), Pin()
    assert table.take("ab", [kept])
    assert not table.take("cd", [over])
    assert (kept.releases, over.releases, table.total) == (0, 1, 2)
    assert table.take("", [over])
    assert over.releases == 2, "a lookup that found nothing holds nothing"


def test_an_ended_load_writes_no_more_and_ending_waits_for_the_write_that_runs() -> None:
    loading = Loading()
    load = loading.begin("ab")
    inside, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def write() -> None:
        inside.set()
        assert go_on.wait(DEADLINE_S)
        assert not ended.is_set()

    writer = threading.Thread(target=load.writing, args=(write,))
    writer.start()
    assert inside.wait(DEADLINE_S)

    def end() -> None:
        loading.end_uncovered("b", lambda key: 0)
        ended.set()

    ender = threading.Thread(target=end)
    ender.start()
    go_on.set()
    ender.join(DEADLINE_S)
    writer.join(DEADLINE_S)
    assert ended.is_set()
    assert not load.writing(lambda: pytest.fail("written after its end"))
    loading.done(load)
    loading.end_all()


def test_workers_refuse_what_is_over_their_bound_and_outlive_what_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers, go_on = Workers("test", 1, 2), threading.Event()
    done: queue.Queue[int] = queue.Queue()
    begun = threading.Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        raise ValueError("of the first")

    assert workers.submit(first)
    assert begun.wait(DEADLINE_S)
    assert [workers.submit(lambda n=n: done.put(n)) for n in range(3)] == [True, True, False]
    with caplog.at_level(logging.CRITICAL):
        go_on.set()
        assert [done.get(timeout=DEADLINE_S) for _ in range(2)] == [0, 1]
    assert workers.alive
    assert workers.close(DEADLINE_S)
    assert not workers.submit(lambda: None)


class Notifier:
    def __init__(self) -> None:
        self.told: list[str] = []

    def fileno(self) -> int:
        return 7

    def notify(self) -> None:
        self.told.append("notify")

    def close(self) -> None:
        self.told.append("close")


def test_an_outcome_is_told_once_and_those_that_nobody_asks_for_are_bounded() -> None:
    notifier = Notifier()
    results: TaskResults[int] = TaskResults(notifier)
    assert results.take(1) is None
    results.put(1, 10)
    assert (results.take(1), results.take(1)) == (10, None)
    for task in range(5000):
        results.put(task, task)
    left = results.take_all()
    assert 1000 < len(left) < 5000
    assert max(left) == 4999
    assert results.take_all() == {}
    results.close()
    results.close()
    results.put(6, 6)
    assert notifier.told.count("close") == 1
    assert notifier.told[-1] == "close", "its descriptor may be somebody else's by now"
