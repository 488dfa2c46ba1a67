"""`kvwarehouse bench remote` at sizes that say nothing: what it prints, that loads are read from
the store and puts end there, and that a store of the user's is as it was. No time is asserted."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwarehouse.cli.main import main
from kvwarehouse.errors import CapacityError, TransportError, UsageError, WarehouseError
from kvwarehouse.remote.object_store import ObjectStore
from kvwarehouse_bench.micro import remote
from kvwarehouse_bench.micro.figures import Figure
from kvwarehouse_bench.micro.options import Options, noise, prompt
from kvwarehouse_bench.micro.remote_host import RemoteHost, remote_host
from kvwarehouse_bench.micro.remote_lookup import lookups
from kvwarehouse_bench.micro.remote_store import BenchStore, ObstoreAlone, bench_store

pytest.importorskip("kvwarehouse.core._native", reason="the core is not built")

PAGE_BYTES = 4096
PAGES = 2 * remote.RUN_PAGES
OBJECT_BYTES = remote.RUN_PAGES * (4096 + PAGE_BYTES)
TOKENS = prompt(PAGES, seed=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def options(folder: Path) -> Options:
    return Options(2, PAGE_BYTES, PAGES, None, remote=f"file://{folder}")


@pytest.fixture
def started(options: Options) -> Iterator[Callable[..., tuple[BenchStore, RemoteHost]]]:
    with ExitStack() as stack:

        def start(**settings: Any) -> tuple[BenchStore, RemoteHost]:
            made = stack.enter_context(bench_store(options, 0))
            usual = {"dram": 64 << 20, "remote_write": "all", "remote_capacity": 1 << 40}
            return made, stack.enter_context(remote_host(made, {**usual, **settings}))

        yield start


def _with_few_keys(options: Options) -> list[Figure]:
    sizes = dataclasses.replace(options.sizes, filter_keys=20_000)
    return lookups(dataclasses.replace(options, sizes=sizes))


def test_bench_of_a_remote_store_compares_loads_puts_and_lookups_and_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "of the user's").write_text("stays")
    monkeypatch.setattr(remote, "lookups", _with_few_keys)
    asked = ["bench", "remote", "--remote", f"file://{folder}", "--page", "4KiB"]
    assert main([*asked, "--bytes", "128KiB", "--rounds", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    shown = json.loads(out)
    assert shown["conditions"]["remote store"] == f"file://{folder}"
    figures = {each["name"]: each for each in shown["figures"]}
    moved = ["load from a remote store, pages of 4 KiB", "put into a remote store, pages of 4 KiB"]
    looked_up = [
        "lookup of 2,048 pages in a remote store, objects of 16 pages each, p50",
        "lookup of 2,048 pages in a remote store, objects of a page each, p50",
        "lookup whose first page misses, with a remote store, p50",
    ]
    assert list(figures) == [*moved, *looked_up, "memory of the filter, 20,000 keys"]
    for name in (*moved, *looked_up):
        assert figures[name]["value"] > 0
        assert figures[name]["limit"] > 0
        assert figures[name]["goal"]
    assert [figures[name]["limit_name"] for name in moved] == [
        "obstore alone, 8 gets at a time",
        "obstore alone, 2 puts at a time",
    ]
    assert [path.name for path in folder.iterdir()] == ["of the user's"]


def test_page_is_put_and_loaded_as_the_daemon_counts_it(
    started: Callable[..., tuple[BenchStore, RemoteHost]],
) -> None:
    made, host = started()
    ns, pages = host.open(PAGE_BYTES), noise(PAGES, PAGE_BYTES)
    assert host.put(ns, TOKENS, pages) > 0
    objects = made.objects(ns.space.id)
    assert [each.size_bytes for each in objects] == [OBJECT_BYTES] * 2
    out = np.ones_like(pages)
    for times in (1, 2):  # also of what was read a moment ago
        out[:] = 1
        assert host.load(ns, TOKENS, out) > 0
        assert np.array_equal(out, pages)
        assert host.core["loads"]["pages_from_remote"] == times * PAGES
    tier = host.until(
        lambda: host.tier if host.tier["gets"].get("filled") == 4 else None, "all reads are told"
    )
    assert (tier["puts"]["stored"], tier["gets"]) == (2, {"filled": 4})
    assert tier["get_bytes"] == 2 * 2 * OBJECT_BYTES


def test_load_that_does_not_come_from_the_store_is_an_error(
    started: Callable[..., tuple[BenchStore, RemoteHost]],
) -> None:
    made, host = started()
    ns, pages = host.open(PAGE_BYTES), noise(PAGES, PAGE_BYTES)
    host.put(ns, TOKENS, pages)
    made.remove(made.objects(ns.space.id))
    with pytest.raises(WarehouseError, match=f"0 of {PAGES} pages .*remote_missing"):
        host.load(ns, TOKENS, np.ones_like(pages))


def test_put_of_what_the_store_has_no_room_for_is_an_error(
    started: Callable[..., tuple[BenchStore, RemoteHost]],
) -> None:
    # A daemon may put a third of it, and an object of the two fits into that.
    _, host = started(remote_capacity=4 * OBJECT_BYTES)
    with pytest.raises(CapacityError, match=r"'no_room': 1.*--bytes"):
        host.put(host.open(PAGE_BYTES), TOKENS, noise(PAGES, PAGE_BYTES))


def test_store_that_is_not_there_is_refused(tmp_path: Path) -> None:
    missing = Options(2, PAGE_BYTES, PAGES, None, remote=f"file://{tmp_path}/missing")
    with pytest.raises(UsageError, match="is no folder"), bench_store(missing, 0):
        pass


def test_obstore_alone_reads_and_puts_whole_objects_of_the_same_sizes(
    options: Options, folder: Path
) -> None:
    with bench_store(options, 0) as made, ObstoreAlone(made, [1000, 5000]) as alone:
        seen: list[tuple[str, int]] = []
        real = made.store.delete

        def delete(names: Any) -> None:
            seen.extend((name, (folder / name).stat().st_size) for name in names)
            real(names)

        made.store.delete = delete  # type: ignore[method-assign]
        assert alone.put() > 0
        assert [size for _, size in seen] == [1000, 5000]
        assert all(name.startswith(made.names.root) for name, _ in seen)
        made.store.put(f"{made.names.root}bench/one", bytes(1000))
        [one] = made.store.list(f"{made.names.root}bench/")
        assert alone.get([one]) > 0
        real([one.name])
        with pytest.raises(WarehouseError, match="lost"):
            alone.get([one])
    assert not list(folder.rglob("*"))


def test_what_cannot_be_removed_is_said(
    options: Options,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    really = shutil.rmtree

    def refused(*_: object) -> None:
        raise TransportError("delete: 403 Forbidden", code="remote_refused")

    def unless_stored(path: Any, **how: Any) -> None:
        if not Path(path).is_relative_to(folder):
            really(path, **how)

    with bench_store(options, 0) as made:
        made.store.put(f"{made.names.root}probe/1", b"1")
        monkeypatch.setattr(ObjectStore, "delete", refused)
        monkeypatch.setattr(shutil, "rmtree", unless_stored)
    assert not made.secret_path.parent.exists()
    err = capsys.readouterr().err
    assert f"{options.remote}/{made.names.root}" in err
    assert "403 Forbidden" in err
