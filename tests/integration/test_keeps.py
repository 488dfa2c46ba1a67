"""Prompts whose pages stay, on real daemons: by clients and the command, and over restarts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse import aio
from kvwarehouse.cli import main
from kvwarehouse.daemon import ledger_file
from kvwarehouse.errors import CapacityError, UsageError
from kvwarehouse_bench.harness.serving import Serving

PAGE_TOKENS = 4
PAGE_BYTES = 64 * 1024
PROMPT = list(range(100, 140))
PAGES = len(PROMPT) // PAGE_TOKENS
WAIT_S = 60.0


def space(**fields: Any) -> kvw.Namespace:
    values: dict[str, Any] = {
        "model": "m", "weights": "w", "dtype": "f", "layout": "t/1",
        "page_tokens": PAGE_TOKENS, "page_bytes": PAGE_BYTES, **fields,
    }  # fmt: skip
    return kvw.Namespace(**values)


def rows(pages: int = PAGES) -> Any:
    return np.ones((pages, PAGE_BYTES), np.uint8)


def store(ns: kvw.OpenNamespace, tokens: list[int]) -> None:
    pages = len(tokens) // PAGE_TOKENS
    assert ns.store(tokens, rows(pages), timeout_s=WAIT_S).stored == pages


def fill(ns: kvw.OpenNamespace, mark: int = 0) -> None:
    """Three times what the daemon's DRAM holds, of prompts that nobody keeps."""
    for prompt in range(3 * (16 << 20) // (PAGES * PAGE_BYTES)):
        tokens = [1_000_000 + mark * 100_000 + prompt * 100 + at for at in range(len(PROMPT))]
        ns.store(tokens, rows(), timeout_s=WAIT_S)


def in_dram(ns: kvw.OpenNamespace) -> int:
    return int(kvw.Tier.near(ns.tiers(PROMPT)).sum())


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def in_ledger(serving: Serving) -> list[str]:
    """The keeps that a daemon that is killed now leaves to the next."""
    records = ledger_file.read(str(serving.arena_dir / ledger_file.FILE_NAME))
    return [json.loads(value)["name"] for key, value in records.items() if key.startswith(b"k/")]


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="16MiB") as started:
        yield started


@pytest.fixture
def client(serving: Serving) -> Iterator[kvw.Client]:
    with serving.connect() as connected:
        yield connected


def test_kept_prompt_stays_until_it_is_removed(client: kvw.Client) -> None:
    ns = client.open(space())
    store(ns, PROMPT)
    kept = client.keep(ns, PROMPT, ttl_s=600, name="agent")
    assert (kept.name, kept.pages, kept.bytes) == ("agent", PAGES, PAGES * PAGE_BYTES)
    assert (kept.namespace_id, kept.model, kept.renewed) == (ns.space.id, "m", False)
    fill(ns)
    assert ns.lookup(PROMPT).pages == PAGES
    listed = client.keeps()
    assert [each.name for each in listed.keeps] == ["agent"]
    assert 0 < listed.keeps[0].left_s <= 600
    assert listed.bytes == PAGES * PAGE_BYTES
    assert listed.capacity_bytes == 8 << 20
    core = client.status()["core"]
    assert (core["keeps"], core["kept_pages"]) == (1, PAGES)
    assert client.remove_keep("agent") == 1
    assert client.remove_keep("agent") == 0
    until(lambda: client.keeps().bytes == 0)
    fill(ns, 1)
    assert ns.lookup(PROMPT).pages == 0


def test_keep_of_the_same_name_gives_way_and_holds_what_is_shared_once(
    client: kvw.Client,
) -> None:
    ns = client.open(space())
    store(ns, PROMPT)
    longer = [*PROMPT, *range(16)]
    client.keep(ns, PROMPT, ttl_s=600, name="chat")
    store_rest = ns.store(longer, rows(4), first=PAGES, timeout_s=WAIT_S)
    assert store_rest.stored == 4
    assert client.keep(ns, longer, ttl_s=600, name="chat").pages == PAGES + 4
    assert client.keep(ns, PROMPT, ttl_s=600, name="other").pages == PAGES
    listed = client.keeps()
    assert sorted(each.name for each in listed.keeps) == ["chat", "other"]
    assert listed.bytes == (PAGES + 4) * PAGE_BYTES
    # Of another namespace the name is another's.
    salted = client.open(space(salt="s"))
    store(salted, PROMPT)
    client.keep(salted, PROMPT, ttl_s=600, name="chat")
    assert client.remove_keep("chat", ns) == 1
    assert client.remove_all_keeps(salted) == 1
    assert [each.name for each in client.keeps().keeps] == ["other"]
    assert client.remove_all_keeps() == 1


def test_only_what_is_stored_is_kept_and_of_nothing_there_is_no_keep(client: kvw.Client) -> None:
    ns = client.open(space())
    nothing = client.keep(ns, PROMPT, ttl_s=600)
    assert (nothing.name, nothing.pages, nothing.left_s) == ("", 0, 0)
    assert client.keeps().keeps == ()
    store(ns, PROMPT[:20])
    kept = client.keep(ns, PROMPT, ttl_s=600)
    assert kept.name.startswith("keep-")
    assert kept.pages == 5
    assert len(client.keeps().keeps) == 1


def test_pages_that_stand_alone_are_kept_by_their_keys(client: kvw.Client) -> None:
    ns = client.open(space(hash_scheme="vllm/1"))
    keys = [kvw.KeyRun([bytes([number]) * 32]) for number in range(4)]
    for number in (0, 1, 3):
        ns.store(keys=[keys[number]], pages=rows(1), timeout_s=WAIT_S)
    kept = client.keep(ns, keys=keys, ttl_s=600)
    assert kept.pages == 3
    other = [kvw.KeyRun([number.to_bytes(32)]) for number in range(1000, 1200)]
    for each in other * 2:
        ns.store(keys=[each], pages=rows(1), timeout_s=WAIT_S)
    tiers = ns.tiers(keys=keys)
    assert [bool(tier) for tier in tiers] == [True, True, False, True]
    with pytest.raises(UsageError, match="stand alone") as refused:
        client.keep(ns, keys=[kvw.KeyRun([b"a", b"b"])], ttl_s=600)
    assert refused.value.code == "bad_run"


def test_keys_from_the_middle_of_a_prompt_are_not_kept(client: kvw.Client) -> None:
    ns = client.open(space(hash_scheme="vllm/1"))
    keys = [number.to_bytes(32) for number in range(PAGES)]
    ns.store(keys=keys, pages=rows(), timeout_s=WAIT_S)
    assert client.keep(ns, keys=keys[-1:], ttl_s=600).pages == 0
    assert client.keep(ns, keys=[*keys[:2], keys[3]], ttl_s=600).pages == 2


def test_what_does_not_fit_is_refused_whole(client: kvw.Client) -> None:
    ns = client.open(space())
    tokens = list(range(4 * 140))
    store(ns, tokens)
    with pytest.raises(CapacityError, match="keep-percent") as full:
        client.keep(ns, tokens, ttl_s=600)
    assert full.value.code == "keeps_full"
    until(lambda: client.keeps().bytes == 0)
    assert client.keep(ns, tokens[: 4 * 100], ttl_s=600).pages == 100


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"ttl_s": 0}, "bad_keep"),
        ({"ttl_s": float("nan")}, "bad_keep"),
        ({"ttl_s": float("inf")}, "bad_keep"),
        ({"name": "a\nb"}, "bad_keep"),
        ({"name": "x" * 257}, "bad_keep"),
        ({"tokens": None, "keys": [b"k"]}, "bad_prefix"),
        ({"tokens": None}, "bad_prefix"),
    ],
)
def test_keep_that_is_none_is_refused(client: kvw.Client, wrong: dict[str, Any], code: str) -> None:
    ns = client.open(space())
    store(ns, PROMPT)
    with pytest.raises(UsageError) as refused:
        client.keep(ns, **{"tokens": PROMPT, "ttl_s": 60, **wrong})
    assert refused.value.code == code
    assert client.keeps().keeps == ()


def test_keep_ends_at_its_time(client: kvw.Client) -> None:
    ns = client.open(space())
    store(ns, PROMPT)
    client.keep(ns, PROMPT, ttl_s=1)
    until(lambda: client.status()["core"]["kept_pages"] == 0)
    until(lambda: client.keeps().keeps == ())


def test_prompt_that_lost_its_last_page_is_kept_over_a_restart(tmp_path: Path) -> None:
    with Serving(tmp_path, dram="16MiB") as serving:
        with serving.connect() as client:
            ns = client.open(space())
            store(ns, PROMPT)
            client.keep(ns, PROMPT, ttl_s=600, name="agent")
            until(lambda: in_ledger(serving) == ["agent"])
            assert client.evict(ns, 1, "all") == 1
            until(lambda: [each.pages for each in client.keeps().keeps] == [PAGES - 1])
        serving.kill()
        serving.start()
        with serving.connect() as client:
            ns = client.open(space())
            fill(ns)
            assert ns.lookup(PROMPT).pages == PAGES - 1
            (kept,) = client.keeps().keeps
            assert kept.pages == PAGES - 1


def test_keep_of_what_is_gone_is_lost_with_a_word(tmp_path: Path) -> None:
    with Serving(tmp_path, dram="16MiB") as serving:
        with serving.connect() as client:
            store(client.open(space()), PROMPT)
            client.keep(client.open(space()), PROMPT, ttl_s=600, name="agent")
            until(lambda: in_ledger(serving) == ["agent"])
        serving.kill()
        for name in ("arena", "slots"):
            (serving.arena_dir / name).unlink()
        serving.start()
        assert [each["gone"] for each in serving.events("keeps_lost")] == [1]
        with serving.connect() as client:
            assert client.keeps().keeps == ()
            until(lambda: in_ledger(serving) == [])


def test_clear_takes_what_is_kept(client: kvw.Client) -> None:
    ns = client.open(space())
    store(ns, PROMPT)
    client.keep(ns, PROMPT, ttl_s=600)
    client.clear(ns)
    assert client.keeps().bytes == 0
    until(lambda: client.keeps().keeps == ())


@pytest.mark.parametrize("kill", [False, True], ids=["stop", "kill"])
def test_keeps_outlive_the_daemon(tmp_path: Path, kill: bool) -> None:
    with Serving(tmp_path, dram="16MiB") as serving:
        with serving.connect() as client:
            ns = client.open(space())
            store(ns, PROMPT)
            client.keep(ns, PROMPT, ttl_s=600, name="agent", renewed=True)
            client.keep(ns, PROMPT[:8], ttl_s=600, name="gone")
            client.remove_keep("gone")
        if kill:
            until(lambda: in_ledger(serving) == ["agent"])
            serving.kill()
        else:
            serving.stop()
        serving.start()
        with serving.connect() as client:
            (kept,) = client.keeps().keeps
            assert (kept.name, kept.pages, kept.renewed) == ("agent", PAGES, True)
            assert 500 < kept.left_s <= 600
            ns = client.open(space())
            fill(ns)
            assert ns.lookup(PROMPT).pages == PAGES
            assert client.remove_keep("agent") == 1
        serving.stop()
        serving.start()
        with serving.connect() as client:
            assert client.keeps().keeps == ()


def test_page_on_nvme_alone_is_brought_to_dram_and_stays(tmp_path: Path) -> None:
    with (
        Serving(tmp_path, dram="16MiB", nvme_capacity="64MiB") as serving,
        serving.connect() as client,
    ):
        ns = client.open(space())
        store(ns, PROMPT)
        assert client.flush().pending == 0
        assert client.evict(ns, PAGES, "dram") == PAGES
        assert in_dram(ns) == 0
        assert client.keep(ns, PROMPT, ttl_s=600).pages == PAGES
        until(lambda: in_dram(ns) == PAGES)
        fill(ns)
        assert in_dram(ns) == PAGES


def test_asyncio_client_keeps_too(serving: Serving) -> None:
    async def run() -> None:
        async with await aio.connect(serving.address) as client:
            ns = await client.open(space())
            await ns.store(PROMPT, rows(), timeout_s=WAIT_S)
            assert (await client.keep(ns, PROMPT, ttl_s=600, name="a")).pages == PAGES
            assert [each.name for each in (await client.keeps()).keeps] == ["a"]
            assert await client.remove_keep("a") == 1
            assert await client.remove_all_keeps() == 0

    asyncio.run(run())


def test_command_keeps_lists_and_removes(
    serving: Serving, client: kvw.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ns = client.open(space())
    store(ns, PROMPT)
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps([*PROMPT, *range(8)]), encoding="utf-8")

    def command(*args: str) -> tuple[int, str]:
        status = main(["keep", *args, "--address", serving.address])
        said = capsys.readouterr()
        return status, said.out + said.err

    added = command("add", str(file), "m", "--ttl", "2h", "--as", "system", "--renewed")
    assert added == (
        0,
        "kept as system: 10 pages (640 KiB) of the prompt's 12; the rest is not stored, for"
        " 02:00:00 after each use\n",
    )
    status, said = command("list")
    assert status == 0
    assert "system" in said
    assert "640 KiB of 8 MiB" in said
    status, said = command("list", "--json")
    assert json.loads(said)["keeps"][0]["name"] == "system"
    assert command("remove", "system") == (0, "removed 1 keep\n")
    assert command("remove", "system")[0] == 2
    assert command("remove", "m", "--all") == (0, "removed 0 keeps\n")
    assert command("remove", "--all") == (0, "removed 0 keeps\n")
    file.write_text("1 2 3 4", encoding="utf-8")
    assert command("add", str(file), "m", "--ttl", "1h") == (
        4, "nothing of this prompt is stored, so nothing is kept\n",
    )  # fmt: skip
    for wrong in (
        ("add", str(file), "m"),
        ("add", str(file), "--ttl", "1h"),
        ("add", str(file), "m", "--ttl", "never"),
        ("add", str(file), "m", "--ttl", "1h", "--as", ""),
        ("list", "x"),
        ("list", "--ttl", "1h"),
        ("remove",),
        ("remove", ""),
        ("remove", "x", "m", "--all"),
        ("remove", "x", "--all"),
    ):
        assert command(*wrong)[0] == 2, wrong
