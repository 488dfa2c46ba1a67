"""Where pages are: what `tiers` says is what a dictionary of them would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwarehouse import Client, KeyRun, Namespace, OpenNamespace, Tier, UsageError
from kvwarehouse.embedded import PrivateDaemon

TOKENS = list(range(100, 140))
KEYS = [bytes([n]) * 32 for n in range(10)]


@pytest.fixture
def path() -> str:
    return "local"


def test_tiers_end_at_the_first_gap_of_a_prompt(ns: OpenNamespace, pages: Any) -> None:
    assert ns.tiers(TOKENS).tolist() == [Tier.MISSING] * 10
    ns.store(TOKENS[:12], pages[:3])
    tiers = ns.tiers(TOKENS)
    assert (tiers.dtype, tiers.shape) == (np.uint8, (10,))
    assert tiers.tolist() == [Tier.DRAM] * 3 + [Tier.MISSING] * 7
    assert ns.tiers([]).tolist() == ns.tiers(keys=[]).tolist() == []


def test_tiers_end_at_the_first_gap_of_each_run(ns: OpenNamespace, pages: Any) -> None:
    ns.store(keys=KEYS[:3], pages=pages[:3])
    ns.store(keys=[KeyRun([b"alone"])], pages=pages[:1])
    runs = [
        KeyRun([KEYS[0], b"gap", KEYS[2]]), KeyRun([b"lost"]), KeyRun([b"alone"]), KeyRun([]),
        KeyRun(KEYS[1:4], 1, KEYS[0]),
    ]  # fmt: skip
    assert ns.tiers(keys=runs).tolist() == [1, 0, 0, 0, 1, 1, 1, 0]


def test_tiers_count_as_a_lookup(client: Client, ns: OpenNamespace, pages: Any) -> None:
    ns.store(keys=KEYS[:3], pages=pages[:3])
    before = client.status()["core"]["lookups"]
    ns.tiers(keys=[KeyRun(KEYS), KeyRun([KEYS[1]])])
    after = client.status()["core"]["lookups"]
    rise = {name: after[name] - before[name] for name in after}
    assert rise == {
        "calls": 1,
        "pages_hit_hbm": 0,
        "pages_hit_dram": 4,
        "pages_hit_nvme": 0,
        "pages_hit_remote": 0,
        "pages_missed": 7,
    }
    assert ns.tiers(keys=KEYS, counted=False).tolist() == [1] * 3 + [0] * 7
    assert client.status()["core"]["lookups"] == after


@pytest.mark.parametrize("path", ["remote", "model"])
def test_remote_client_has_nothing_of_shared_memory(
    client: Client, ns: OpenNamespace, path: str
) -> None:
    for call in (
        lambda: ns.tiers(TOKENS),
        lambda: ns.tiers(keys=[KeyRun(KEYS)]),
        client.control,
        client.refresh,
    ):
        with pytest.raises(UsageError, match="unix://") as caught:
            call()
        assert caught.value.code == "unsupported"


@pytest.fixture
def tiered(tmp_path: Path, connected: Callable[[str, str], Client]) -> Iterator[Client]:
    settings = {"dram": "64MiB", "nvme_dir": str(tmp_path / "nvme"), "nvme_capacity": "1GiB"}
    with PrivateDaemon(settings) as daemon, connected("local", daemon.address) as client:
        yield client


def test_tiers_are_those_of_a_dictionary_after_pages_were_evicted(
    tiered: Client, space: Namespace, rng: Any
) -> None:
    """The daemon's listing says where each page is; tiers must say the same, up to the gaps."""
    ns = tiered.open(space)
    runs = [KeyRun([b"%d %d" % (n, page) for page in range(10)]) for n in range(3)]
    runs += [KeyRun([b"alone %d" % n]) for n in range(10)]
    names: dict[bytes, bytes] = {}  # the warehouse's key to the engine's
    for run in runs:
        for end in range(1, len(run.keys) + 1):
            ns.store(keys=run.keys[:end], pages=np.zeros((1, 4096), np.uint8), first=end - 1)
            (new,) = [page.key for page in tiered.pages(space) if page.key not in names]
            names[new] = run.keys[end - 1]
    assert tiered.flush().pending == 0
    seen = set()
    for where in ("dram", "nvme", "all") * 2:
        tiered.evict(space, rng.randint(3, 8), where)
        model = {names[page.key]: _tier(page.tiers) for page in tiered.pages(space)}
        expected = []
        for run in runs:
            tiers = [model.get(key, Tier.MISSING) for key in run.keys]
            gap = (*tiers, Tier.MISSING).index(Tier.MISSING)
            expected += tiers[:gap] + [Tier.MISSING] * (len(tiers) - gap)
        assert ns.tiers(keys=runs).tolist() == expected
        alone = [KeyRun([key]) for run in runs for key in run.keys]
        assert ns.tiers(keys=alone).tolist() == [model.get(run.keys[0], 0) for run in alone]
        for number, run in enumerate(runs[:3]):
            mine = expected[10 * number : 10 * number + 10]
            by_tier = {
                "hbm": 0,
                "dram": mine.count(Tier.DRAM),
                "nvme": mine.count(Tier.NVME),
                "remote": 0,
            }
            assert ns.lookup(keys=run.keys).by_tier == by_tier
        seen |= set(expected)
    assert seen == {Tier.MISSING, Tier.DRAM, Tier.NVME}


def _tier(tiers: tuple[str, ...]) -> Tier:
    return Tier.DRAM if "dram" in tiers else Tier.NVME
