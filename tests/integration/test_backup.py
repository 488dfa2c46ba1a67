"""`kvwarehouse export` and `import` between real daemons of different identities: pages arrive as
they were, under keys of the target's own, and neither side is put at risk for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.backup import (
    BackupReader,
    BackupWriter,
    Export,
    ExportCounts,
    Import,
    ImportCounts,
    RateLimit,
    Target,
    exporting,
    importing,
    new_file,
)
from kvwarehouse.backup.room import MayLeave
from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.errors import StorageError, TransportError, UsageError
from kvwarehouse_bench.harness.pages import check_pages, page_of, pages_of
from kvwarehouse_bench.harness.serving import Serving
from testkit.damage import find

PAGE_BYTES = 20_000  # no multiple of a block: shards are padded
PAGE_TOKENS = 4
WAIT_S = 60.0


def space(model: str = "moved", **fields: Any) -> kvw.Namespace:
    kept = {"weights": "w", "dtype": "uint8", "layout": "test/1"}
    shape = {"page_tokens": PAGE_TOKENS, "page_bytes": PAGE_BYTES, "shards": 1}
    return kvw.Namespace(model, **{**kept, **shape, **fields})


SHARDED = space("sharded", shards=3)
LORA = space(adapter="lora-7")
SALTED = space(salt="tenant secret")
KEYED = space("keyed", hash_scheme="engine/1", shards=2)
ALL = (space(), SHARDED, LORA, SALTED, KEYED)


class Prompt(NamedTuple):
    """`pages` of it; the first `shared` are those of chain 0."""

    pages: int
    chain: int = 0
    shared: int = 0

    @property
    def nodes(self) -> list[int]:
        own = [self.chain << 20 | page for page in range(self.shared, self.pages)]
        return [*range(self.shared), *own]

    def prefix(self, space: kvw.Namespace) -> dict[str, Any]:
        if space.hash_scheme == "engine/1":
            return {"keys": [b"%d" % node for node in self.nodes]}
        return {"tokens": np.repeat(np.array(self.nodes, np.uint32), PAGE_TOKENS)}


PROMPTS = (Prompt(12), Prompt(20, 1, 5), Prompt(7, 2, 5), Prompt(1, 3))


def store(client: kvw.Client, space: kvw.Namespace, *prompts: Prompt) -> None:
    """All shards of some pages, then of the next, as ranks do it side by side."""
    opened = client.open(space)
    for prompt in prompts or PROMPTS:
        for first in range(0, prompt.pages, 25):
            some = prompt._replace(pages=min(first + 25, prompt.pages))
            for shard in range(space.shards):
                pages = pages_of(some.nodes[first:], shard, 0, space.page_bytes)
                place: dict[str, Any] = {"shard": shard, "first": first, "timeout_s": WAIT_S}
                assert not opened.store(**some.prefix(space), pages=pages, **place).dropped


def check(client: kvw.Client, space: kvw.Namespace, *prompts: Prompt) -> None:
    """All of them are there, as they were stored."""
    opened = client.open(space)
    for prompt in prompts or PROMPTS:
        assert opened.lookup(**prompt.prefix(space)).pages == prompt.pages
        for shard in range(space.shards):
            out = np.zeros((prompt.pages, space.page_bytes), np.uint8)
            loaded = opened.load(**prompt.prefix(space), out=out, shard=shard, timeout_s=WAIT_S)
            assert loaded == prompt.pages
            check_pages(out, prompt.nodes, shard, 0)


def pages_at(client: kvw.Client) -> int:
    return int(client.status()["core"]["index"]["pages"])


Hook = Callable[[], object]


class Spent(RateLimit):
    """Counts what it is told, and waits for nothing."""

    def __init__(self) -> None:
        super().__init__(None)
        self.bytes = 0

    def spend(self, size_bytes: int) -> None:
        self.bytes += size_bytes


def exported(
    client: kvw.Client,
    path: Path,
    *,
    tier: str | None = None,
    after_first: Hook | None = None,
    rate: RateLimit | None = None,
) -> ExportCounts:
    """after_first: done once the first window is written."""
    spaces = client.namespaces()
    export = Export(client, tier=tier, rate=rate or RateLimit(None), timeout_s=WAIT_S)
    with new_file(str(path)) as file:
        writer = BackupWriter(file, "00" * 16, spaces)
        for number, _ in enumerate(export.run(writer, spaces)):
            if number == 0 and after_first is not None:
                after_first()
        writer.end()
    return export.counts


def imported(  # noqa: PLR0913  what it is tried with
    client: kvw.Client,
    path: Path,
    *,
    evict: MayLeave = "none",
    salts: tuple[str, ...] = (SALTED.salt,),
    after_first: Hook | None = None,
    in_window: Hook | None = None,
    rate: RateLimit | None = None,
) -> ImportCounts:
    """in_window: done as the first window's pages are about to be stored."""
    with path.open("rb") as file:
        reader = BackupReader(file)
        target = Target(client, reader.namespaces, salts=salts)
        rate = rate or RateLimit(None)
        moved = Import(client, target, may_leave=evict, rate=rate, timeout_s=WAIT_S)
        if in_window is not None:
            moved._room = Interrupted(moved._room, in_window)  # type: ignore[assignment]
        for number, _ in enumerate(moved.run(reader)):
            if number == 0 and after_first is not None:
                after_first()
    return moved.counts


class Interrupted:
    """Room, and what happens when it is looked for the first time."""

    def __init__(self, room: Any, hook: Hook) -> None:
        self.take = room.take
        self._room = room
        self._hook: Hook | None = hook

    def look(self) -> None:
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()
        self._room.look()


@pytest.fixture(scope="module")
def two_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Serving]]:
    with (
        Serving(tmp_path_factory.mktemp("source"), dram="32MiB", nvme_capacity="32MiB") as source,
        Serving(tmp_path_factory.mktemp("target"), dram="32MiB") as target,
    ):
        yield source, target


def emptied(serving: Serving) -> Serving:
    """As if it were new, however the test before left it."""
    with serving.connect() as client:
        client.undrain()
        client.clear(all=True, forget=True)
        assert not client.namespaces()
    return serving


@pytest.fixture
def source(two_daemons: tuple[Serving, Serving]) -> Serving:
    return emptied(two_daemons[0])


@pytest.fixture
def target(two_daemons: tuple[Serving, Serving]) -> Serving:
    return emptied(two_daemons[1])


def evictions(client: kvw.Client) -> int:
    left = client.status()["core"]["tiers"]["dram"]["left"]
    return sum(left.get(why, 0) for why in ("evicted", "rebalanced"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "backup.kvw"


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two pages, so that there is a middle."""
    for module in (exporting, importing):
        monkeypatch.setattr(module, "WINDOW_BYTES", 2 * PAGE_BYTES)


def connected(serving: Serving, how: str) -> kvw.Client:
    return serving.connect_remote() if how == "remote" else serving.connect()


@pytest.mark.parametrize("how", ["local", "remote"])
def test_all_pages_are_found_at_a_target_of_another_identity(
    source: Serving, target: Serving, path: Path, how: str
) -> None:
    with connected(source, how) as client:
        for each in ALL:
            store(client, each)
        left = client.status()["core"]
        counts = exported(client, path)
        assert not counts.left_out
        assert counts.pages == counts.planned == pages_at(client) == 30 * len(ALL)
        assert client.status()["core"]["lookups"] == left["lookups"], "nobody looked up"
        keys = {page.key for each in ALL for page in client.pages(each)}
    with connected(target, how) as client:
        before = client.status()["core"]
        assert before["warehouse_id"] != left["warehouse_id"]
        counts_in = imported(client, path)
        assert counts_in == ImportCounts(
            pages=counts.pages, payload_bytes=counts.payload_bytes, stored=counts.pages
        )
        assert client.status()["core"]["lookups"] == before["lookups"], "nobody looked up"
        for each in ALL:
            check(client, each)
        assert not keys & {page.key for each in ALL for page in client.pages(each)}


def test_pages_that_stand_alone_are_moved_too(source: Serving, target: Serving, path: Path) -> None:
    """As those of windows and states: each is a run of one key, and some have a position."""
    runs = [kvw.KeyRun([b"alone %d" % node]) for node in range(9)]
    runs += [kvw.KeyRun([b"later"], 1, b"alone 3")]
    nodes = [*range(9), 77]
    with source.connect() as client:
        opened = client.open(KEYED)
        for shard in range(2):
            opened.store(keys=runs, pages=pages_of(nodes, shard, 0, PAGE_BYTES), shard=shard)
        assert exported(client, path).pages == 10
    with target.connect() as client:
        assert imported(client, path).stored == 10
        out = np.zeros((10, PAGE_BYTES), np.uint8)
        assert client.open(KEYED).load(keys=runs, out=out, shard=1) == 10
        check_pages(out, nodes, 1, 0)


def to_nvme(client: kvw.Client) -> None:
    assert client.flush().pending == 0
    client.evict(None, 100_000, "dram")
    assert client.status()["core"]["tiers"]["dram"]["pages"] == 0


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


def test_page_that_leaves_dram_meanwhile_is_left_out_where_dram_is_asked_for(
    source: Serving, path: Path, small_windows: None
) -> None:
    with source.connect() as client:
        store(client, space(), Prompt(12))
        assert client.flush().pending == 0
        counts = exported(client, path, tier="dram", after_first=lambda: to_nvme(client))
        assert counts.pages == 2
        assert counts.left_out == {"not_in_dram": 1, "no_parent": 9}


def test_page_that_leaves_during_the_export_is_left_out_with_its_descendants(
    source: Serving, target: Serving, path: Path, small_windows: None
) -> None:
    with source.connect() as client:
        store(client, space(), Prompt(12), Prompt(20, 1, 5))

        def leave() -> None:
            client.clear(space())
            store(client, space(), Prompt(5))

        counts = exported(client, path, after_first=leave)
        assert counts.pages == 5
        assert counts.left_out == {"gone": 2, "no_parent": 6 + 14}
    with target.connect() as client:
        assert imported(client, path).stored == 5
        check(client, space(), Prompt(5))


def test_namespace_that_is_forgotten_during_the_export_ends_nothing(
    source: Serving, path: Path, small_windows: None
) -> None:
    with source.connect() as client:
        store(client, space(), Prompt(12))
        store(client, LORA, Prompt(12))

        def forget() -> None:
            for each in (space(), LORA):
                client.clear(each, forget=True)

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


@pytest.mark.parametrize("how", ["local", "remote"])
def test_import_again_passes_over_what_is_there(
    source: Serving, target: Serving, path: Path, how: str
) -> None:
    with connected(source, how) as client:
        for each in (SHARDED, KEYED):
            store(client, each)
        exported(client, path)
    with connected(target, how) as client:
        store(client, SHARDED, Prompt(9))
        first, again = imported(client, path), imported(client, path)
        assert (first.stored, first.already) == (60 - 9, 9)
        assert (again.stored, again.already, again.left) == (0, 60, 0)
        assert pages_at(client) == 60


def test_rate_counts_what_is_moved_and_not_what_is_there(
    source: Serving, target: Serving, path: Path
) -> None:
    out, into, again = Spent(), Spent(), Spent()
    with source.connect() as client:
        store(client, SHARDED)
        assert exported(client, path, rate=out).payload_bytes == out.bytes > 0
    with target.connect() as client:
        imported(client, path, rate=into)
        imported(client, path, rate=again)
    assert (into.bytes, again.bytes) == (out.bytes, 0)


def fill(client: kvw.Client, mib: int) -> kvw.Namespace:
    """What the engines of the target use."""
    engines = space("engines", page_bytes=1 << 18)
    pages = mib * 4
    ids = np.arange(pages * PAGE_TOKENS, dtype=np.uint32)
    client.open(engines).store(ids, np.ones((pages, 1 << 18), np.uint8), timeout_s=WAIT_S)
    return engines


def test_nothing_is_evicted_for_an_import_and_what_is_left_is_counted(
    source: Serving, target: Serving, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with source.connect() as client:
        store(client, SHARDED, Prompt(200))
        exported(client, path)
    with target.connect() as client:
        fill(client, 16)
        there, evicted = pages_at(client), evictions(client)
        arguments = ["import", str(path), "--socket", target.socket, "--json"]
        status, shown = main(arguments), json.loads(capsys.readouterr().out)
        assert status == Exit.FOUND
        assert 0 < shown["stored"] < 200
        assert shown["stored"] + shown["left"] == shown["pages"] == 200
        assert pages_at(client) == there + shown["stored"]
        stored = shown["stored"]
        check(client, SHARDED, Prompt(stored))
        status, shown = main(arguments), json.loads(capsys.readouterr().out)
        assert (status, shown["already"]) == (Exit.FOUND, stored)
        assert shown["left"] > 0
        assert evictions(client) == evicted
        assert main([*arguments, "--evict", "all"]) == Exit.OK
        check(client, SHARDED, Prompt(200))


def test_import_waits_for_the_room_that_a_clear_gives_back(
    source: Serving, target: Serving, path: Path
) -> None:
    """Incident: a moment after a clear all memory was still of other page sizes, and nothing was
    stored."""
    with source.connect() as client:
        store(client, KEYED)
        exported(client, path)
    with target.connect() as client:
        large = space("large", page_bytes=1 << 20)
        for chain in range(26):
            store(client, large, Prompt(1, chain))
        client.clear(all=True, forget=True)
        counts = imported(client, path)
        assert (counts.stored, counts.left) == (30, 0), counts
        check(client, KEYED)


def test_import_may_push_pages_out_of_dram_that_nvme_has(
    source: Serving, tmp_path: Path, path: Path
) -> None:
    with source.connect() as client:
        store(client, SHARDED, Prompt(200))
        exported(client, path)
    with (
        Serving(tmp_path / "target", dram="8MiB", nvme_capacity="64MiB") as target,
        target.connect() as client,
    ):
        assert imported(client, path).left > 0
        counts = imported(client, path, evict="dram")
        assert (counts.already + counts.stored, counts.left) == (200, 0), counts
        check(client, SHARDED, Prompt(200))


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
    with source.connect() as client:
        store(client, LORA)
        store(client, KEYED)
        assert exported(client, path).pages == 60
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


def test_clear_beside_an_import_that_is_interrupted_is_not_undone(
    source: Serving, target: Serving, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the storing of its pages and the look whether they were cleared."""
    with source.connect() as client:
        store(client, space())
        exported(client, path)
    take_run, taken = Import._take_run, list[int]()

    def interrupted(self: Import, opened: kvw.OpenNamespace, run: Any) -> None:
        take_run(self, opened, run)
        taken.append(pages_at(client))
        raise KeyboardInterrupt

    with target.connect() as client:
        client.open(space())
        monkeypatch.setattr(Import, "_take_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            imported(client, path, in_window=lambda: client.clear(space()))
        monkeypatch.undo()
        assert taken[0] > 0
        assert pages_at(client) == 0
        assert imported(client, path).stored == 30
        check(client, space())


def test_namespace_whose_pages_fit_no_slab_is_refused_before_anything_is_stored(
    source: Serving, tmp_path: Path, path: Path
) -> None:
    large = space("large", page_bytes=3 << 20)
    with source.connect() as client:
        store(client, space())
        store(client, large, Prompt(2))
        exported(client, path)
    with Serving(tmp_path / "small", dram="16MiB") as small, small.connect() as client:
        with pytest.raises(UsageError, match="slab"):
            imported(client, path)
        assert pages_at(client) == 0


def test_damaged_backup_is_refused_where_the_damage_begins(
    source: Serving, target: Serving, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with source.connect() as client:
        store(client, space(), Prompt(12))
        exported(client, path)
    data = bytearray(path.read_bytes())
    data[data.find(page_of(7, 0, 0, PAGE_BYTES).tobytes()) + 9000] ^= 1
    path.write_bytes(data)
    assert main(["import", str(path), "--socket", target.socket]) == Exit.FAILED
    said = capsys.readouterr().err
    assert "[backup_damaged]" in said
    assert "7 pages before that are stored" in said
    with target.connect() as client:
        assert pages_at(client) == 7
        check(client, space(), Prompt(7))


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
def test_import_goes_on_where_the_killed_daemon_ended_it(
    source: Serving, target: Serving, path: Path, small_windows: None, *, how: str
) -> None:
    with source.connect() as client:
        store(client, SHARDED)
        exported(client, path)
    with connected(target, how) as client:
        with pytest.raises(TransportError):
            imported(client, path, after_first=target.kill)
        target.start()
        counts = imported(client, path)
        assert counts.already > 0
        assert counts.already + counts.stored == 30
        check(client, SHARDED)


def test_import_into_a_daemon_that_drains_says_so(
    source: Serving, target: Serving, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with source.connect() as client:
        store(client, space())
        exported(client, path)
    with target.connect() as client:
        client.drain()
        assert main(["import", str(path), "--socket", target.socket]) == Exit.FAILED
        assert "--undo" in capsys.readouterr().err


def test_namespace_that_differs_from_one_of_its_name_is_refused_in_words(
    source: Serving, target: Serving, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with source.connect() as client:
        store(client, space())
        exported(client, path)
    with target.connect() as client:
        client.open(space(page_bytes=4096, dtype="float16"))
        arguments = ["import", str(path), "--socket", target.socket]
        assert main(arguments) == Exit.USAGE
        said = capsys.readouterr().err
        assert "page_bytes is 20000 in the backup and 4096 here" in said
        assert "dtype is 'uint8' in the backup and 'float16' here" in said
        assert len(client.namespaces()) == 1, "nothing was opened"
        assert main([*arguments, "--beside"]) == Exit.OK
        check(client, space())


def test_namespaces_of_one_name_that_lived_side_by_side_move_together(
    source: Serving, target: Serving, path: Path
) -> None:
    both = (space(), space(attention_backend="other"))
    with source.connect() as client:
        for each in both:
            store(client, each)
        exported(client, path)
    with target.connect() as client:
        store(client, both[1], Prompt(3))
        assert imported(client, path).stored == 60 - 3
        for each in both:
            check(client, each)


def test_salted_namespace_needs_its_salt_once(
    source: Serving, target: Serving, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with source.connect() as client:
        store(client, SALTED)
        exported(client, path)
    assert b"tenant secret" not in path.read_bytes()
    arguments = ["import", str(path), "--socket", target.socket]
    with target.connect() as client:
        for salts in ((), ("wrong",)):
            with pytest.raises(UsageError) as caught:
                imported(client, path, salts=salts)
            assert caught.value.code == "salted"
        (tmp_path / "salts").write_text("wrong\ntenant secret\n")
        assert main([*arguments, "--salt-file", str(tmp_path / "salts")]) == Exit.OK
        check(client, SALTED)
        assert main(arguments) == Exit.OK, "the daemon knows it now"


def command(*arguments: str, serving: Serving, **options: Any) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-P", "-m", "kvwarehouse", *arguments, "--socket", serving.socket]
    return subprocess.Popen(program, stderr=subprocess.PIPE, **options)


def test_backup_goes_through_a_pipe(source: Serving, target: Serving) -> None:
    with source.connect() as client:
        store(client, SHARDED, Prompt(100))
    out = command("export", "-o", "-", serving=source, stdout=subprocess.PIPE)
    into = command(
        "import", "-", "--json", serving=target, stdin=out.stdout, stdout=subprocess.PIPE
    )
    assert out.stdout is not None
    out.stdout.close()
    shown, said = into.communicate(timeout=WAIT_S)
    assert into.returncode == Exit.OK, said
    assert json.loads(shown)["stored"] == 100
    assert b"exported 100 pages" in out.communicate(timeout=WAIT_S)[1]
    assert out.returncode == Exit.OK
    with target.connect() as client:
        check(client, SHARDED, Prompt(100))


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


def test_pipe_that_is_cut_off_is_refused(source: Serving, target: Serving, path: Path) -> None:
    with source.connect() as client:
        store(client, space())
        exported(client, path)
    data = path.read_bytes()
    into = command("import", "-", serving=target, stdin=subprocess.PIPE)
    _, said = into.communicate(data[: len(data) // 2], timeout=WAIT_S)
    assert into.returncode == Exit.FAILED
    assert b"[backup_cut]" in said


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


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["export", "-o", "-", "--json"], Exit.USAGE),
        (["export", "-o", "x", "--limit-rate", "1KiB"], Exit.USAGE),
        (["export", "-o", "x", "--namespace", "none"], Exit.USAGE),
        (["export", "-o", "no/such/folder/x"], Exit.FAILED),
        (["import", "no-such-file"], Exit.FAILED),
        (["import", "x", "--salt-file", "no-such-file"], Exit.USAGE),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_line(
    source: Serving,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    arguments: list[str],
    status: Exit,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--socket", source.socket]) == status
    captured = capsys.readouterr()
    assert captured.err.startswith("kvwarehouse: ")
    assert not captured.out
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("x")]


def test_damage_of_the_backup_is_of_its_class() -> None:
    """Scripts match on the status: it is 1, not that of wrong arguments."""
    from kvwarehouse.cli.exit_codes import exit_code_of

    assert exit_code_of(StorageError("x", code="backup_damaged")) == Exit.FAILED
