"""Backups of and into a daemon with a remote tier: what the store has this daemon does not have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwarehouse.client.listed import held_prefix, open_listed
from testkit.backups import connected, exported, imported
from testkit.remote_host import RUN_PAGES, RemoteHost, tokens


@pytest.fixture
def host(tmp_path: Path) -> Iterator[RemoteHost]:
    one = RemoteHost(tmp_path, remote_write="all")
    try:
        one.start()
        yield one
    finally:
        one.remove()


@pytest.mark.parametrize("how", ["local", "remote"])
def test_import_stores_pages_that_only_the_remote_store_has(
    host: RemoteHost, path: Path, how: str
) -> None:
    """Incident: on the daemon's host all of them counted as stored, and none was there."""
    host.put(1)
    assert exported(host.client, path).pages == RUN_PAGES
    host.empty()
    host.until_remote(1)
    with connected(host.serving, how) as client:
        (space,) = client.namespaces()
        opened = open_listed(client, space)
        assert held_prefix(opened, tokens(1)) == (0, 0)
        counts = imported(client, path)
        assert (counts.stored, counts.already) == (RUN_PAGES, 0), counts
        assert held_prefix(opened, tokens(1)) == (RUN_PAGES, 0)
    assert host.found(1) == {"dram": RUN_PAGES}


@pytest.mark.parametrize("tier", ["dram", None])
@pytest.mark.parametrize("how", ["local", "remote"])
def test_page_that_left_and_that_the_remote_store_cannot_give_is_left_out(
    host: RemoteHost, path: Path, small_windows: None, how: str, tier: str | None
) -> None:
    """Incident: the export failed, as if the daemon had not answered."""
    host.put(1)

    def leave() -> None:
        host.empty()
        host.until_remote(1)
        for each in host.paths().values():
            each.unlink()

    with connected(host.serving, how) as client:
        counts = exported(client, path, tier=tier, after_first=leave)
    assert 0 < counts.pages < RUN_PAGES
    assert counts.left_out == {"gone": 1, "no_parent": RUN_PAGES - counts.pages - 1}
