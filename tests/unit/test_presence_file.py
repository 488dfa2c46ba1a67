"""PresenceFile as Python sees it; what it does is native/tests/presence_file_test.cc's."""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvwarehouse.core import PresenceFile
from kvwarehouse.errors import StorageError, UsageError
from testkit.timed_store import KeptPages

FLEET, OTHER = bytes(range(16)), bytes(16)
TODAY, DAYS, OBJECTS = 20785, 7, 1000


def presence_file(path: Path, fleet: bytes = FLEET, today: int = TODAY) -> PresenceFile:
    return PresenceFile(str(path / "presence"), fleet, OBJECTS, DAYS, today)


def keys(count: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(16 * count)


def put(file: PresenceFile, some: bytes, day: int, epoch: int = 0) -> dict[str, int]:
    count = len(some) // 16
    return file.put(some, np.full(count, epoch, np.uint64), np.full(count, day, np.uint32))


def test_what_was_put_is_found_and_counted_by_outcome(tmp_path: Path) -> None:
    file = presence_file(tmp_path)
    some = keys(10)
    assert file.made_anew
    assert file.cells >= OBJECTS
    outcomes = put(file, some, TODAY - 1)
    assert outcomes.pop("added") == 10
    assert set(outcomes) == {"renewed", "already", "replaced", "no_room", "outside"}
    assert not any(outcomes.values())
    assert put(file, some[:32], TODAY)["renewed"] == 2
    assert put(file, some, TODAY - 1)["already"] == 10
    assert put(file, some, TODAY + 1)["outside"] == 10
    assert file.day_of(some[:16], 0) == TODAY
    assert file.day_of(some[-16:], 0) == TODAY - 1
    assert file.day_of(some[:16], 1) is None
    assert (file.objects, file.objects_of(TODAY), file.newest) == (10, 2, TODAY)


def test_removed_and_expired_are_not_found(tmp_path: Path) -> None:
    file = presence_file(tmp_path)
    some = keys(2)
    put(file, some, TODAY)
    assert file.remove(some[:16], 0, TODAY)
    assert not file.remove(some[:16], 0, TODAY)
    assert file.objects == 1
    file.advance(TODAY + DAYS, TODAY + DAYS)
    assert (file.objects, file.newest) == (0, TODAY + DAYS)


def test_double_of_the_tests_takes_what_the_file_takes(tmp_path: Path, rng: random.Random) -> None:
    file, double = presence_file(tmp_path), KeptPages(DAYS, TODAY)
    some, today = [keys(1, seed) for seed in range(30)], TODAY
    for _ in range(2000):
        key, day = rng.choice(some), today + rng.randrange(-DAYS - 1, 3)
        if rng.random() < 0.02:
            today += rng.choice([-1, 1, 1, 3])
            file.advance(today, today)
            double.advance(today, today)
        elif rng.random() < 0.3:
            assert file.remove(key, 0, day) == double.remove(key, 0, day)
        else:
            ended = {end: count for end, count in put(file, key, day).items() if count}
            assert ended == double.put(key, [0], [day])
        assert (file.newest, file.day_of(key, 0)) == (double.newest, double.day_of(key, 0))


def test_next_process_finds_it_unless_it_is_another_fleets(tmp_path: Path) -> None:
    some = keys(1)
    put(presence_file(tmp_path), some, TODAY)
    again = presence_file(tmp_path)
    assert not again.made_anew
    assert again.day_of(some, 0) == TODAY
    assert presence_file(tmp_path, OTHER).made_anew


def test_threads_put_side_by_side(tmp_path: Path) -> None:
    file = presence_file(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        parts = [keys(100, seed) for seed in range(4)]
        added = sum(pool.map(lambda some: put(file, some, TODAY)["added"], parts))
    assert file.objects == added
    assert added > 390  # 0.16 % of those that are not there look as if they were


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    file = presence_file(tmp_path)
    with pytest.raises(UsageError, match="do not go together"):
        file.put(keys(2), np.zeros(2, np.uint64), np.zeros(1, np.uint32))
    with pytest.raises(UsageError, match="an id has 16 bytes"):
        file.day_of(b"short", 0)
    file.close()
    file.close()
    with pytest.raises(UsageError, match="was closed"):
        file.day_of(keys(1), 0)


def test_file_that_was_cut_is_said_to_be_lost_and_made_anew(tmp_path: Path) -> None:
    file = presence_file(tmp_path)
    os.truncate(tmp_path / "presence", 4096)
    with pytest.raises(StorageError, match="has lost") as caught:
        put(file, keys(1), TODAY)
    assert caught.value.code == "presence_lost"
    assert presence_file(tmp_path).made_anew
