"""Clears, interrupts and killed daemons beside an export or an import."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse.backup import BackupReader, Import, importing
from kvwarehouse.client.listed import HeldPrefix
from kvwarehouse.errors import TransportError
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from testkit.backups import (
    KEYED,
    LORA,
    SHARDED,
    Prompt,
    back_up,
    check,
    connected,
    exported,
    imported,
    pages_at,
    space,
    store,
)


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("when", ["after_first", "in_window"])
@pytest.mark.parametrize("how", ["local", "remote"])
def test_clear_beside_an_import_is_not_undone(  # noqa: PLR0913  what it is tried with
    source: Serving,
    target: Serving,
    path: Path,
    small_windows: None,
    *,
    how: str,
    when: str,
    forget: bool,
) -> None:
    """In the window: after the import saw that nothing was cleared, and before it stores."""
    assert back_up(source, path, LORA, KEYED).pages == 60
    with connected(target, how) as client, connected(target, how) as other:
        cleared: list[kvw.Namespace] = []

        def clear() -> None:
            with path.open("rb") as file:
                first = next(iter(BackupReader(file).namespaces))
            cleared.extend(each for each in (LORA, KEYED) if each.id == first)
            other.clear(cleared[0], forget=forget)
            if when == "after_first":
                store(other, cleared[0], later)  # engines go on

        later = Prompt(3, 9)
        hooks: dict[str, Any] = {when: clear}
        counts = imported(client, path, **hooks)
        (kept,) = {LORA, KEYED} - set(cleared)
        before = 2 // cleared[0].shards if when == "after_first" else 0
        found = (counts.stored, counts.cleared, counts.left)
        assert found == (30 + before, 30 - before, 0), counts
        check(client, kept)
        if when == "after_first":
            check(client, cleared[0], later)
        assert pages_at(client) == 30 + (3 if when == "after_first" else 0)


def test_nothing_is_ever_there_behind_a_clear_beside_an_import(
    source: Serving, target: Serving, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: pages were stored behind the clear, and taken out again by the import, unless it
    was killed before it looked."""
    back_up(source, path, space())
    take_run, taken = Import._take_run, list[int]()

    def interrupted(self: Import, run: Any) -> None:
        take_run(self, run)
        taken.append(pages_at(client))
        raise KeyboardInterrupt

    with target.connect() as client:
        client.open(space())
        monkeypatch.setattr(Import, "_take_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            imported(client, path, in_window=lambda: client.clear(space()))
        monkeypatch.undo()
        assert taken == [0]
        assert pages_at(client) == 0
        assert imported(client, path).stored == 30
        check(client, space())


def test_pages_whose_parents_left_by_a_clear_count_as_cleared(
    source: Serving, target: Serving, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with source.connect() as client:
        store(client, space())
        exported(client, path)
    look, looks = importing.held_prefix, list[int]()

    with target.connect() as client:

        def look_or_clear(opened: kvw.OpenNamespace, **prefix: Any) -> HeldPrefix:
            looks.append(len(looks))
            if len(looks) == 3:  # the first run is stored, and the next goes on from a page of it
                client.clear(space())
            return look(opened, **prefix)

        monkeypatch.setattr(importing, "held_prefix", look_or_clear)
        counts = imported(client, path)
        assert counts.stored > 0
        assert counts.cleared > 0
        assert (counts.stored + counts.cleared, counts.dropped) == (30, {})
        assert pages_at(client) == 0


def test_page_that_one_look_takes_for_missing_is_looked_for_again(
    source: Serving, target: Serving, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: the daemon was held up in an entry of the index for longer than a lookup waits, and
    all pages behind that one were left out, as if their parents were not there."""
    with source.connect() as client:
        store(client, space())
        exported(client, path)
    look, looks = importing.held_prefix, list[int]()

    def look_half(opened: kvw.OpenNamespace, **prefix: Any) -> HeldPrefix:
        looks.append(len(looks))
        return HeldPrefix(0, 0) if len(looks) % 2 else look(opened, **prefix)

    monkeypatch.setattr(importing, "held_prefix", look_half)
    with target.connect() as client:
        counts = imported(client, path)
        assert (counts.stored, counts.already, counts.dropped) == (30, 0, {})
        monkeypatch.undo()
        check(client, space())


def test_export_ends_where_the_daemon_does_and_leaves_no_file(
    source: Serving, path: Path, small_windows: None
) -> None:
    with source.connect() as client:
        store(client, space())
        with pytest.raises(TransportError):
            exported(client, path, after_first=source.kill)
        assert not list(path.parent.glob("backup.kvw*"))
        source.start()
        exported(client, path)
    with path.open("rb") as file:
        assert len(list(BackupReader(file).pages())) == 30


@pytest.mark.parametrize("how", ["local", "remote"])
def test_export_ends_where_the_daemon_stands_still_as_it_lists(
    source: Serving, path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Incident: it waited for a day."""
    watch = kvw.Client.watch

    def paused(client: kvw.Client, space: Any) -> Any:
        source.pause()
        return watch(client, space)

    monkeypatch.setattr(kvw.Client, "watch", paused)
    try:
        with connected(source, how) as client:
            store(client, space())
            with pytest.raises(TransportError, match="--timeout") as caught:
                exported(client, path, timeout_s=0.2)
            assert caught.value.code == "deadline"
            assert not path.exists()
        # The client is closed, and nobody waits any more.
        eventually(lambda: not _listing(), "the thread that listed ends")
    finally:
        source.resume()


def _listing() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("kvw-listing")]


@pytest.mark.parametrize("how", ["local", "remote"])
def test_import_goes_on_where_the_killed_daemon_ended_it(
    source: Serving, target: Serving, path: Path, small_windows: None, *, how: str
) -> None:
    back_up(source, path, SHARDED)
    with connected(target, how) as client:
        with pytest.raises(TransportError):
            imported(client, path, after_first=target.kill)
        target.start()
        counts = imported(client, path)
        assert counts.already > 0
        assert counts.already + counts.stored == 30
        check(client, SHARDED)
