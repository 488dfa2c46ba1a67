"""What earlier versions left: a present daemon opens every fixture of tests/fixtures and serves
every page of it, from both tiers and from either alone (scripts/make_fixture.py says what is in
one)."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import Serving
from testkit import tally

pytestmark = pytest.mark.timeout(120)

FIXTURES = sorted((Path(__file__).parent.parent / "fixtures").glob("format-*.tar.xz"))
NEW_NODES = [200, 201, 202]


class Left:
    """A fixture, unpacked to where a daemon will look for it."""

    def __init__(self, fixture: Path, disk: Path) -> None:
        with tarfile.open(fixture) as archive:
            archive.extractall(disk / "unpacked", filter="data")
        unpacked = disk / "unpacked"
        facts = json.loads((unpacked / "facts.json").read_text(encoding="utf-8"))
        for place, size_bytes in facts["sizes"].items():
            os.truncate(unpacked / place, size_bytes)
        self.stored: list[dict[str, Any]] = facts["stored"]
        self.unfinished: list[int] = facts["unfinished"]
        self.serving = Serving(disk, grace_s="0.1", **facts["settings"])
        shutil.copytree(unpacked / "arena", self.serving.arena_dir)
        shutil.copytree(unpacked / "nvme", self.serving.nvme_dir)
        for folder in (self.serving.arena_dir, self.serving.nvme_dir):
            for path in (folder, *folder.rglob("*")):
                path.chmod(0o700 if path.is_dir() else 0o600)


@pytest.fixture(params=FIXTURES, ids=lambda path: path.name.split(".")[0])
def left(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Left]:
    left = Left(request.param, tmp_path)
    yield left
    left.serving.remove()


def prompt(by: str, nodes: list[int]) -> dict[str, Any]:
    if by == "keys":
        return {"keys": [bytes([node]) * 32 for node in nodes]}
    return {"tokens": [token for node in nodes for token in (node, node)]}


def check_served(client: kvw.Client, stored: dict[str, Any]) -> None:
    """All of the namespace's pages, every byte, and nothing that was cleared or evicted."""
    space = kvw.Namespace(**stored["fields"])
    ns, nodes = client.open(space), stored["nodes"]
    for shard in range(space.shards):
        out = np.zeros((len(nodes), space.page_bytes), np.uint8)
        assert ns.load(out=out, shard=shard, timeout_s=60, **prompt(stored["by"], nodes)) == len(
            nodes
        )
        check_pages(out, nodes, shard, 0)
    assert {page.position for page in client.pages(space)} == set(range(len(nodes)))


def check_all_served(client: kvw.Client, left: Left) -> None:
    for stored in left.stored:
        check_served(client, stored)
    kept = {kvw.Namespace(**stored["fields"]).id for stored in left.stored}
    assert kept == {found.id for found in client.namespaces()}
    assert client.status()["core"]["quarantined"] == 0
    assert client.status()["service"]["ledger_health"] == "ok"


def test_there_is_a_fixture_of_every_format() -> None:
    assert [path.name for path in FIXTURES] == ["format-1.tar.xz"]


def test_files_of_an_earlier_version_are_served_whole(left: Left) -> None:
    serving = left.serving
    serving.start()
    with serving.connect(timeout_s=60) as client:
        core = client.status()["core"]
        assert core["recovery"]["pages_dram"] == sum(stored["dram"] for stored in left.stored)
        assert core["recovery"]["pages_nvme"] == sum(len(each["nodes"]) for each in left.stored)
        assert core["recovery"]["unfinished_slots"] == len(left.unfinished)
        assert core["recovery"]["dropped_slots"] == core["recovery"]["refused_records"] == 0
        check_all_served(client, left)

        def settled() -> bool:
            dram = client.status()["core"]["tiers"]["dram"]
            return dram["reserved_slots"] == dram["limbo_slots"] == 0

        eventually(settled, "what its dead clients had reserved is free")
    tally.count("warehouse of an earlier format opened")


def test_segments_of_an_earlier_version_are_served_without_their_arena(left: Left) -> None:
    serving = left.serving
    shutil.rmtree(serving.arena_dir)
    for _ in range(2):  # the second start reads what the first has closed
        serving.start()
        with serving.connect(timeout_s=60) as client:
            check_all_served(client, left)
        serving.kill()
        tally.count("warehouse of an earlier format opened")


def test_warehouse_of_an_earlier_version_goes_on(left: Left) -> None:
    serving = left.serving
    serving.start()
    with serving.connect(timeout_s=60) as client:
        space = kvw.Namespace(**left.stored[0]["fields"])
        ns = client.open(space)
        for shard in range(space.shards):
            pages = pages_of(NEW_NODES, shard, 0, space.page_bytes)
            new = prompt("tokens", NEW_NODES)
            result = ns.store(pages=pages, shard=shard, timeout_s=60, **new)
            assert result.stored == len(NEW_NODES)
        assert client.flush().pending == 0
        serving.kill()
        serving.lose_arena()
        serving.start()
        for shard in range(space.shards):
            out = np.zeros((len(NEW_NODES), space.page_bytes), np.uint8)
            wanted = prompt("tokens", NEW_NODES)
            assert ns.load(out=out, shard=shard, timeout_s=60, **wanted) == len(NEW_NODES)
            check_pages(out, NEW_NODES, shard, 0)
    tally.count("warehouse of an earlier format opened")
