"""`kvwarehouse import` into a real daemon of another identity: pages arrive as they were, under
keys of its own, and it is not put at risk for them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.backup import ImportCounts
from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.errors import StorageError, UsageError
from kvwarehouse_bench.harness.pages import check_pages, page_of, pages_of
from kvwarehouse_bench.harness.serving import Serving
from testkit.backups import (
    ALL,
    KEYED,
    PAGE_BYTES,
    PAGE_TOKENS,
    SALTED,
    SHARDED,
    WAIT_S,
    Prompt,
    Spent,
    back_up,
    check,
    command,
    connected,
    exported,
    imported,
    pages_at,
    space,
    store,
)


def evictions(client: kvw.Client) -> int:
    left = client.status()["core"]["tiers"]["dram"]["left"]
    return sum(left.get(why, 0) for why in ("evicted", "rebalanced"))


def fill(client: kvw.Client, mib: int) -> kvw.Namespace:
    """What the engines of the target use."""
    engines = space("engines", page_bytes=1 << 18)
    pages = mib * 4
    ids = np.arange(pages * PAGE_TOKENS, dtype=np.uint32)
    client.open(engines).store(ids, np.ones((pages, 1 << 18), np.uint8), timeout_s=WAIT_S)
    return engines


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


@pytest.mark.parametrize("how", ["local", "remote"])
def test_import_again_passes_over_what_is_there(
    source: Serving, target: Serving, path: Path, how: str
) -> None:
    back_up(source, path, SHARDED, KEYED, how=how)
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


def test_nothing_is_evicted_for_an_import_and_what_is_left_is_counted(
    source: Serving, target: Serving, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    back_up(source, path, SHARDED, prompts=[Prompt(200)])
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
    back_up(source, path, KEYED)
    with target.connect() as client:
        large = space("large", page_bytes=1 << 20)
        for chain in range(26):
            store(client, large, Prompt(1, chain))
        client.clear(all=True, forget=True)
        counts = imported(client, path)
        assert (counts.stored, counts.left) == (30, 0), counts
        check(client, KEYED)


@pytest.mark.parametrize("write_queue", ["0", "256KiB"])
def test_import_may_push_pages_out_of_dram_that_nvme_has(
    source: Serving, tmp_path: Path, path: Path, write_queue: str
) -> None:
    """Incident: what a small write queue did not take stayed in DRAM alone, and was pushed out by
    the pages behind it: a third of what was reported stored was gone."""
    back_up(source, path, SHARDED, prompts=[Prompt(200)])
    settings = {"dram": "8MiB", "nvme_capacity": "64MiB", "write_queue": write_queue}
    with Serving(tmp_path / "target", **settings) as target, target.connect() as client:
        assert imported(client, path).left > 0
        counts = imported(client, path, evict="dram")
        assert (counts.already + counts.stored, counts.left) == (200, 0), counts
        check(client, SHARDED, Prompt(200))


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
    back_up(source, path, space(), prompts=[Prompt(12)])
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


def test_import_into_a_daemon_that_drains_says_so(
    source: Serving, target: Serving, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    back_up(source, path, space())
    with target.connect() as client:
        client.drain()
        assert main(["import", str(path), "--socket", target.socket]) == Exit.FAILED
        assert "--undo" in capsys.readouterr().err


def test_namespace_that_differs_from_one_of_its_name_is_refused_in_words(
    source: Serving, target: Serving, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    back_up(source, path, space())
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
    back_up(source, path, *both)
    with target.connect() as client:
        store(client, both[1], Prompt(3))
        assert imported(client, path).stored == 60 - 3
        for each in both:
            check(client, each)


def test_salted_namespace_needs_its_salt_once(
    source: Serving, target: Serving, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    back_up(source, path, SALTED)
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


def test_pipe_that_is_cut_off_is_refused(source: Serving, target: Serving, path: Path) -> None:
    back_up(source, path, space())
    data = path.read_bytes()
    into = command("import", "-", serving=target, stdin=subprocess.PIPE)
    _, said = into.communicate(data[: len(data) // 2], timeout=WAIT_S)
    assert into.returncode == Exit.FAILED
    assert b"[backup_cut]" in said


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
