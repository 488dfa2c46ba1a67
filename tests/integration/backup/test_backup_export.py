"""`kvwarehouse export` of a real daemon: what a backup has, what is left out of it, and that the
daemon is not put at risk for it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvwarehouse as kvw
from kvwarehouse.backup import BackupReader
from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.client.grpc_transport import Grpc
from kvwarehouse.client.requests import LoadRequest
from kvwarehouse.client.watch import Changes
from kvwarehouse.errors import CapacityError, TransportError
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.pages import page_of, pages_of
from kvwarehouse_bench.harness.serving import Serving
from testkit.backups import (
    ALL,
    KEYED,
    LORA,
    PAGE_BYTES,
    SHARDED,
    WAIT_S,
    Prompt,
    check,
    command,
    connected,
    exported,
    imported,
    space,
    store,
    to_nvme,
)
from testkit.damage import find


def test_export_on_the_daemons_host_brings_no_page_into_dram(
    source: Serving, target: Serving, path: Path
) -> None:
    with source.connect() as client:
        store(client, SHARDED)
        to_nvme(client)
        assert exported(client, path).pages == 30
        assert client.status()["core"]["tiers"]["dram"]["pages"] == 0
    with target.connect() as client:
        imported(client, path)
        check(client, SHARDED)


@pytest.mark.parametrize("how", ["local", "remote"])
def test_export_of_dram_alone_promotes_nothing(source: Serving, path: Path, how: str) -> None:
    with connected(source, how) as client:
        store(client, space())
        to_nvme(client)
        store(client, LORA)
        promoted = client.status()["core"]["tiers"]["nvme"]["pages_promoted"]
        counts = exported(client, path, tier="dram")
        assert counts.pages == 30
        assert sum(counts.left_out.values()) == 30
        assert client.status()["core"]["tiers"]["nvme"]["pages_promoted"] == promoted


@pytest.mark.parametrize("how", ["local", "remote"])
def test_page_that_leaves_dram_meanwhile_is_left_out_where_dram_is_asked_for(
    source: Serving, path: Path, small_windows: None, how: str
) -> None:
    with connected(source, how) as client:
        store(client, space(), Prompt(12))
        assert client.flush().pending == 0
        counts = exported(client, path, tier="dram", after_first=lambda: to_nvme(client))
        assert counts.pages == 2
        assert counts.left_out == {"not_in_dram": 1, "no_parent": 9}


class SlowNetwork:
    """Loads over gRPC end at their own deadline, with so many pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *pages: int) -> None:
        """pages: of each of the first loads; all others bring what there is."""
        self.loads = 0
        self._pages = pages
        self._load = Grpc.load
        monkeypatch.setattr(Grpc, "load", lambda *args: self.load(*args))

    def load(self, transport: Grpc, request: LoadRequest) -> kvw.Loaded:
        self.loads += 1
        if self.loads > len(self._pages):
            return self._load(transport, request)
        brought = min(self._pages[self.loads - 1], request.out.count)
        if brought:
            assert self._load(transport, request.part(0, brought, WAIT_S)) == brought
        return kvw.Loaded(brought, {"timeout": request.out.count - brought})


@pytest.mark.parametrize("tier", ["dram", None])
def test_pages_that_a_slow_network_brings_one_by_one_are_all_exported(
    source: Serving, path: Path, monkeypatch: pytest.MonkeyPatch, tier: str | None
) -> None:
    """Incident: where the network did not bring a window in the load's time, the pages that did
    not come were left out as on NVMe, with all behind them, and the exit status said whole."""
    with source.connect_remote() as client:
        store(client, SHARDED, Prompt(12))
        network = SlowNetwork(monkeypatch, 5, 5, 1, 7, 1)
        counts = exported(client, path, tier=tier)
    assert network.loads > 5
    assert (counts.pages, counts.left_out) == (12, {})


def test_page_that_comes_into_dram_as_it_is_asked_for_is_exported(
    source: Serving, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with source.connect_remote() as client:
        store(client, space(), Prompt(12))
        SlowNetwork(monkeypatch, 3, 0)
        counts = exported(client, path, tier="dram")
    assert (counts.pages, counts.left_out) == (12, {})


@pytest.mark.parametrize("tier", ["dram", None])
def test_network_that_brings_no_page_in_time_fails_the_export(
    source: Serving, path: Path, monkeypatch: pytest.MonkeyPatch, tier: str | None
) -> None:
    with source.connect_remote() as client:
        store(client, space(), Prompt(12))
        SlowNetwork(monkeypatch, 3, *[0] * 100)
        with pytest.raises(TransportError, match="--timeout") as caught:
            exported(client, path, tier=tier)
    assert caught.value.code == "deadline"
    assert not path.exists()


@pytest.mark.parametrize("how", ["local", "remote"])
def test_pages_on_nvme_are_left_out_from_the_first_on_where_dram_is_asked_for(
    source: Serving, path: Path, how: str
) -> None:
    with connected(source, how) as client:
        for each in (space(), KEYED):
            store(client, each, Prompt(3))
        told = client.watch
        # They leave between the listing and the first load.
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(client, "watch", lambda space: _then(told(space), client))
            counts = exported(client, path, tier="dram")
    assert (counts.pages, counts.left_out) == (0, {"not_in_dram": 4, "no_parent": 2})


def _then(told: Iterator[Changes], client: kvw.Client) -> Iterator[Changes]:
    for message in told:
        if message.synced:
            to_nvme(client)
        yield message


def test_page_that_leaves_during_the_export_is_left_out_with_its_descendants(
    source: Serving, target: Serving, path: Path, small_windows: None
) -> None:
    with source.connect() as client:
        store(client, space(), Prompt(12), Prompt(20, 1, 5))

        def leave() -> None:
            assert client.flush().pending == 0  # what is being written stays
            assert client.evict(space(), 100_000, "all") == 27
            store(client, space(), Prompt(5))

        counts = exported(client, path, after_first=leave)
        assert counts.pages == 5
        assert counts.left_out == {"gone": 2, "no_parent": 6 + 14}
    with target.connect() as client:
        assert imported(client, path).stored == 5
        check(client, space(), Prompt(5))


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("how", ["local", "remote"])
def test_prompt_in_a_backup_is_of_one_computation_over_a_clear(
    source: Serving, target: Serving, path: Path, small_windows: None, *, how: str, forget: bool
) -> None:
    """Incident: engines with new weights stored a prompt anew behind a clear; the file had its
    first pages of the old ones and the others of the new, and an import served them as one."""
    with connected(source, how) as client:
        store(client, space(), Prompt(12))
        store(client, LORA, Prompt(3))

        def clear() -> None:
            client.clear(space(), forget=forget)
            new = pages_of(Prompt(12).nodes, 0, 1, PAGE_BYTES)
            assert client.open(space()).store(**Prompt(12).prefix(space()), pages=new).stored == 12

        counts = exported(client, path, after_first=clear)
        assert (counts.pages, counts.left_out) == (2 + 3, {"gone": 10})
    with target.connect() as client:
        assert imported(client, path).stored == 5
        check(client, space(), Prompt(2))
        check(client, LORA, Prompt(3))


def test_namespace_that_is_forgotten_during_the_export_ends_nothing(
    source: Serving, path: Path, small_windows: None
) -> None:
    with source.connect() as client:
        store(client, space(), Prompt(12))
        store(client, LORA, Prompt(12))

        def forgotten(each: kvw.Namespace) -> bool:
            try:
                client.clear(each, forget=True)
            except CapacityError:  # the daemon has yet to hear that the listing's watch has ended
                return False
            return True

        def forget() -> None:
            for each in (space(), LORA):
                eventually(lambda each=each: forgotten(each), "it is forgotten")

        counts = exported(client, path, after_first=forget)
        assert counts.pages == 2
        assert counts.left_out.total() == 10
    with path.open("rb") as file:
        assert len(list(BackupReader(file).pages())) == 2


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_damaged_page_is_left_out_and_the_exit_status_says_so(
    source: Serving, path: Path, capsys: pytest.CaptureFixture[str], tier: str
) -> None:
    with source.connect() as client:
        store(client, space(), Prompt(12))
        files = [source.arena_dir / "arena"]
        if tier == "nvme":
            to_nvme(client)
            files = source.segments
        for place in find(files, page_of(7, 0, 0, PAGE_BYTES)):  # of tests before, too
            place.flip(at=9000)
        if tier == "dram":
            client.evict(None, 100_000, "nvme")
    status = main(["export", "--socket", source.socket, "-o", str(path), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert (status, shown["pages"]) == (Exit.FOUND, 7)
    assert shown["left_out"] == {"gone": 0, "damaged": 1, "not_in_dram": 0, "no_parent": 4}


def test_export_fails_where_nobody_reads_its_pipe(source: Serving) -> None:
    """Other commands end well where their reader has seen enough; half a backup is none."""
    with source.connect() as client:
        store(client, SHARDED, Prompt(100))
    out = command("export", "-o", "-", serving=source, stdout=subprocess.PIPE)
    assert out.stdout is not None
    out.stdout.close()
    _, said = out.communicate(timeout=WAIT_S)
    assert out.returncode == Exit.FAILED
    assert b"[backup_unwritable]" in said
    assert said.count(b"\n") == 1, "no complaint of the interpreter"


def test_chosen_namespaces_are_exported_alone(
    source: Serving, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with source.connect() as client:
        for each in ALL:
            store(client, each, Prompt(3))
    names = ["--namespace", "keyed", LORA.id.hex()[:12], "--namespace", "sharded"]
    arguments = ["export", "--socket", source.socket, "-o", str(path), *names, "--json"]
    assert main([*arguments, "--limit-rate", "1GiB"]) == Exit.OK
    shown = json.loads(capsys.readouterr().out)
    assert (shown["namespaces"], shown["pages"]) == (3, 9)
    assert shown["file_bytes"] == path.stat().st_size
    with path.open("rb") as file:
        assert set(BackupReader(file).namespaces) == {KEYED.id, LORA.id, SHARDED.id}
