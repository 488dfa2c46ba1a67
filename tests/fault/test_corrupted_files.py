"""The small files of a warehouse, torn, foreign or rubbish: a clear refusal that names the file, or
it is rebuilt, and nothing is lost that others say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvwarehouse.daemon.identity import FILE_NAMES
from kvwarehouse_bench.harness.client_process import ClientProcess
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import RefusedError, Serving
from testkit.known_prompt import KnownPrompt

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("counted")]

PROMPT = KnownPrompt("m", pages=12, page_bytes=20_000)
OTHER = KnownPrompt("other", pages=12, page_bytes=20_000)


def rubbish(path: Path) -> None:
    path.write_bytes(b"rubbish" * 1000)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 8])


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_stale_and_strange_files_beside_the_arena_are_no_obstacle(dram_only: Serving) -> None:
    with dram_only.connect() as client:
        PROMPT.store_whole(client)
        pins = client.open(PROMPT.space).pin(PROMPT.nodes[:3])
        dram_only.kill()
        sessions = dram_only.arena_dir / "sessions"
        rubbish(sessions / "ffffffffffffff01")
        (sessions / "ffffffffffffff02").write_bytes(b"")
        rubbish(sessions / "not-a-session")
        (sessions / "directory").mkdir()
        (sessions / "0000000000000007").symlink_to("/etc/hostname")
        rubbish(dram_only.arena_dir / "index.999")
        rubbish(dram_only.arena_dir / "index.new")
        rubbish(dram_only.arena_dir / "control.new")
        dram_only.start()
        assert PROMPT.load(client) == PROMPT.pages
        assert client.status()["core"]["incarnation"] > 999
        assert not (dram_only.arena_dir / "index.999").exists()
        client.evict(PROMPT.space, PROMPT.pages)
        assert client.open(PROMPT.space).lookup(PROMPT.nodes).pages >= 3, "the pins were lost"
        pins.release()

        def buried() -> bool:
            return not (sessions / "ffffffffffffff01").exists()

        eventually(buried, "a session of nobody is buried")
        assert Path("/etc/hostname").exists()


def test_session_file_that_is_cut_short_ends_the_session_and_not_the_daemon(
    dram_only: Serving,
) -> None:
    """A client can truncate what it can write."""
    sessions = dram_only.arena_dir / "sessions"
    with dram_only.connect() as client:
        PROMPT.store_whole(client)
        before = set(sessions.iterdir())
        with ClientProcess(dram_only.address, "say(1); hear()") as other:
            other.hear()
            [file] = set(sessions.iterdir()) - before
            file.write_bytes(b"")
            assert client.evict(PROMPT.space, 3) == 3  # reads the pins of every session
            assert PROMPT.load(client) == PROMPT.pages - 3
        eventually(lambda: not file.exists(), "the session of the dead client is buried")
        dram_only.stop()
        dram_only.start()
        assert PROMPT.load(client) == PROMPT.pages - 3


@pytest.mark.parametrize("harm", [truncated, zeroed, rubbish, Path.unlink])
def test_damaged_ledger_is_rebuilt_and_brings_back_nothing_that_was_cleared(
    both_tiers: Serving, harm: Callable[[Path], object]
) -> None:
    with both_tiers.connect() as client:
        PROMPT.store_whole(client)
        assert client.flush().pending == 0
        client.clear(PROMPT.space)
        OTHER.store_whole(client)
        assert client.flush().pending == 0
    both_tiers.kill()
    for folder in (both_tiers.nvme_dir, both_tiers.arena_dir):
        harm(folder / "ledger.mdb")
    # Incident: the start that found the damage dropped what was cleared, the one after served it.
    for health in ("rebuilt", "ok", "ok"):
        both_tiers.start()
        with both_tiers.connect() as client:
            assert client.status()["service"]["ledger_health"] == health
            assert client.open(PROMPT.space).lookup(PROMPT.nodes).pages == 0
            assert OTHER.load(client) == PROMPT.pages
        both_tiers.stop()
    both_tiers.start()
    with both_tiers.connect() as client:
        PROMPT.store_whole(client)
        assert PROMPT.load(client) == PROMPT.pages


@pytest.mark.parametrize("opened", [True, False])
def test_namespace_that_outlived_the_ledger_is_cleared_for_good(
    both_tiers: Serving, opened: bool
) -> None:
    """Incident: a client found it in shared memory, so that nobody made the ledger know it: a clear
    of it was refused, and a restart undid a clear of everything."""
    with both_tiers.connect() as client:
        PROMPT.store_whole(client)
        assert client.flush().pending == 0
    both_tiers.kill()
    for folder in (both_tiers.nvme_dir, both_tiers.arena_dir):
        (folder / "ledger.mdb").unlink()
    both_tiers.start()
    with both_tiers.connect() as client:
        if opened:
            assert PROMPT.load(client) == PROMPT.pages
            assert [each.space for each in client.namespaces()] == [PROMPT.space]
        assert client.clear(PROMPT.space if opened else None, all=not opened) == PROMPT.pages
    for _ in range(2):
        both_tiers.kill()
        both_tiers.start()
        with both_tiers.connect() as client:
            assert client.open(PROMPT.space).lookup(PROMPT.nodes).pages == 0


def test_clear_of_a_run_without_the_nvme_tier_holds_when_it_is_back(both_tiers: Serving) -> None:
    """Incident: ledger and epoch file were on the disk that was detached, and the control page was
    made anew for another size: the epoch fell, and a later clear took nothing. Back again, the
    disk's older ledger counted, and what had been cleared was served."""
    with both_tiers.connect() as client:
        for _ in range(3):
            OTHER.store_whole(client)
            client.clear(OTHER.space)
        PROMPT.store_whole(client)
        assert client.flush().pending == 0
    both_tiers.stop()
    names = ("nvme_dir", "nvme_capacity", "nvme_segment")
    detached = {name: both_tiers.settings.pop(name) for name in names}
    both_tiers.start()
    with both_tiers.connect() as client:
        assert PROMPT.load(client) == PROMPT.pages
        assert client.clear(all=True) == PROMPT.pages
    both_tiers.stop()
    both_tiers.settings.update(detached)
    for _ in range(2):
        both_tiers.kill()
        both_tiers.start()
        with both_tiers.connect() as client:
            assert client.open(PROMPT.space).lookup(PROMPT.nodes).pages == 0


def test_new_nvme_directory_costs_the_arena_no_page_and_brings_back_none(
    both_tiers: Serving,
) -> None:
    """Incident: with the disk went the ledger, so that after any clear the arena was not believed
    either, whatever namespace had been cleared."""
    with both_tiers.connect() as client:
        PROMPT.store_whole(client)
        OTHER.store_whole(client)
        client.clear(OTHER.space)
    both_tiers.kill()
    shutil.rmtree(both_tiers.nvme_dir)
    for _ in range(2):
        both_tiers.start()
        with both_tiers.connect() as client:
            assert PROMPT.load(client) == PROMPT.pages
            assert client.open(OTHER.space).lookup(OTHER.nodes).pages == 0
        both_tiers.stop()


def test_halves_of_two_copies_that_went_on_apart_serve_nothing_wrong(
    both_tiers: Serving, tmp_path: Path
) -> None:
    """A copy of a warehouse is one of the same identity. What was stored in each since is of
    namespaces that have the same number there."""
    with both_tiers.connect() as client:
        PROMPT.store_whole(client)
        assert client.flush().pending == 0
    both_tiers.stop()
    copy = Serving(tmp_path / "copy", **{**both_tiers.settings, "nvme_dir": str(tmp_path / "copy")})
    copy.settings.update(
        {
            name: str(copy.folder / Path(copy.settings[name]).name)
            for name in ("arena_dir", "socket")
        }
    )
    shutil.copytree(both_tiers.nvme_dir, copy.nvme_dir)
    shutil.copytree(both_tiers.arena_dir, copy.arena_dir)
    for folder in (copy.nvme_dir, copy.arena_dir):
        folder.chmod(0o700)
    here, there = (KnownPrompt(name, pages=12, page_bytes=20_000, version=version)
                   for version, name in enumerate(("here", "there"), 1))  # fmt: skip
    try:
        for serving, prompt in ((both_tiers, here), (copy, there)):
            serving.start()
            with serving.connect() as client:
                prompt.store_whole(client)
                assert client.flush().pending == 0
                if prompt is here:
                    client.clear(PROMPT.space)
            serving.stop()
        copy.settings["nvme_dir"] = both_tiers.settings["nvme_dir"]
        for _ in range(2):
            copy.start()
            with copy.connect() as client:
                for prompt in (here, there):
                    prompt.load(client)
                assert client.open(PROMPT.space).lookup(PROMPT.nodes).pages == 0
            copy.stop()
    finally:
        copy.remove()


def identity_files(folder: Path) -> list[Path]:
    return [folder / name for name in FILE_NAMES]


@pytest.mark.parametrize("harm", [truncated, zeroed, rubbish, flipped, Path.unlink])
def test_damaged_copy_of_the_identity_is_mended_by_any_other_one(
    both_tiers: Serving, harm: Callable[[Path], object]
) -> None:
    with both_tiers.connect() as client:
        PROMPT.store_whole(client)
        assert client.flush().pending == 0
    # Each alone, then all but the last.
    files = [*identity_files(both_tiers.nvme_dir), *identity_files(both_tiers.arena_dir)]
    good = files[0].read_bytes()
    for harmed in (*([file] for file in files), files[:-1]):
        both_tiers.kill()
        for file in harmed:
            harm(file)
        both_tiers.start()
        # A missing second copy is that of an older daemon, and a directory without any is new.
        if harm is not Path.unlink:
            told = [line["path"] for line in both_tiers.events("identity_mended")]
            assert told == [str(file) for file in harmed]
        assert all(file.read_bytes() == good for file in files)
        with both_tiers.connect() as client:
            assert PROMPT.load(client) == PROMPT.pages


@pytest.mark.parametrize("place", ["nvme_dir", "arena_dir"])
def test_directory_of_another_warehouse_is_not_given_this_ones_identity(
    both_tiers: Serving, tmp_path: Path, place: str
) -> None:
    with Serving(tmp_path / "other", dram="16MiB", nvme_capacity="64MiB") as other:
        with other.connect() as client:
            PROMPT.store_whole(client)
            assert client.flush().pending == 0
        other.stop()
        both_tiers.stop()
        files = identity_files(Path(other.settings[place]))
        good = [file.read_bytes() for file in files]
        for file in files:
            truncated(file)
        own, both_tiers.settings[place] = both_tiers.settings[place], other.settings[place]
        with pytest.raises(RefusedError) as refused:
            both_tiers.start()
        assert str(other.settings[place]) in refused.value.text
        for file, data in zip(files, good, strict=True):
            file.write_bytes(data)
        other.start()
        with other.connect() as client:
            assert PROMPT.load(client) == PROMPT.pages
    both_tiers.settings[place] = own
    both_tiers.start()


@pytest.mark.parametrize("name", FILE_NAMES)
def test_damaged_copy_of_the_identity_costs_no_page_on_nvme_where_the_arena_is_lost(
    both_tiers: Serving, name: str
) -> None:
    with both_tiers.connect() as client:
        PROMPT.store_whole(client)
        assert client.flush().pending == 0
    for _ in range(2):
        both_tiers.stop()
        shutil.rmtree(both_tiers.arena_dir)
        flipped(both_tiers.nvme_dir / name)
        both_tiers.start()
        with both_tiers.connect() as client:
            assert PROMPT.load(client) == PROMPT.pages


@pytest.mark.parametrize("harm", [truncated, zeroed, rubbish, flipped])
def test_identity_without_a_good_copy_is_refused_and_healed_by_one(
    both_tiers: Serving, harm: Callable[[Path], object]
) -> None:
    with both_tiers.connect() as client:
        PROMPT.store_whole(client)
        assert client.flush().pending == 0
    both_tiers.stop()
    shutil.move(both_tiers.arena_dir, both_tiers.folder / "aside")
    files = identity_files(both_tiers.nvme_dir)
    for file in files:
        harm(file)
    with pytest.raises(RefusedError) as refused:
        both_tiers.start()
    for text in (*map(str, files), "copy a good one", f"empty {both_tiers.nvme_dir}"):
        assert text in refused.value.text
    shutil.copy2(both_tiers.folder / "aside" / "identity", files[0])
    both_tiers.start()
    with both_tiers.connect() as client:
        assert PROMPT.load(client) == PROMPT.pages


@pytest.mark.parametrize("name", ["slots", "arena", "control"])
def test_damaged_arena_file_is_refused_by_name_or_rebuilt(dram_only: Serving, name: str) -> None:
    with dram_only.connect() as client:
        PROMPT.store_whole(client)
    dram_only.stop()
    path = dram_only.arena_dir / name
    truncated(path)
    if name == "control":  # says nothing that the slots do not
        dram_only.start()
    else:
        with pytest.raises(RefusedError, match=f"directory {dram_only.arena_dir} away"):
            dram_only.start()
        shutil.move(dram_only.arena_dir, dram_only.folder / "aside")
        dram_only.start()
    with dram_only.connect() as client:
        PROMPT.load(client)
        client.clear(all=True)
        PROMPT.store_whole(client)
        assert PROMPT.load(client) == PROMPT.pages


def test_arena_of_another_warehouse_is_refused_with_both_named(
    both_tiers: Serving, another: Serving
) -> None:
    another.stop()
    both_tiers.stop()
    own, both_tiers.settings["arena_dir"] = both_tiers.arena_dir, str(another.arena_dir)
    with pytest.raises(RefusedError) as refused:
        both_tiers.start()
    assert "different warehouses" in refused.value.text
    assert str(another.arena_dir) in refused.value.text
    assert str(both_tiers.nvme_dir) in refused.value.text
    both_tiers.settings["arena_dir"] = str(own)
    both_tiers.start()
