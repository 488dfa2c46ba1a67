"""What a log holds back: bounded, counted, nothing lost."""

from __future__ import annotations

import random

from kvwarehouse.daemon.repeats import BURST, OF_A_NAME, TOLD_EVERY_S, Repeats


def test_no_event_is_lost_whatever_comes_in_which_order(rng: random.Random) -> None:
    repeats, now_s, said, told, came = Repeats(), 0.0, 0, 0, 20_000
    for number in range(came):
        name, reason = rng.choice(["a", "b", "core c"]), str(rng.choice([0, 0, 0, number]))
        said += repeats.admits(name, {"reason": reason}, now_s)
        now_s += rng.choice([0.0, 0.0, 0.001, 0.5])
        if rng.random() < 0.01:
            told += sum(fields["more"] for _, fields in repeats.due(now_s))
        assert len(repeats) <= 3 * (OF_A_NAME + 1)
    told += sum(fields["more"] for _, fields in repeats.due(now_s, everything=True))
    assert said + told == came
    assert told > 0


def test_memory_is_bounded_and_goes_whatever_the_reasons_are() -> None:
    repeats = Repeats()
    said = sum(repeats.admits("event", {"reason": f"{number}"}, 0.0) for number in range(10_000))
    assert said == OF_A_NAME + BURST  # each of the first ones once, the rest as one kind
    assert len(repeats) == OF_A_NAME + 1
    ((name, fields),) = repeats.due(TOLD_EVERY_S)
    assert (name, fields) == ("event", {"reason": "9999", "more": 10_000 - said})
    assert repeats.due(2 * TOLD_EVERY_S) == []
    assert len(repeats) == 0


def test_reasons_are_told_apart_so_that_one_does_not_hide_another() -> None:
    repeats = Repeats()
    for _ in range(1000):
        repeats.admits("nvme_write_failed", {"error": "EIO"}, 0.0)
    assert repeats.admits("nvme_write_failed", {"error": "ENOSPC"}, 0.0)
    assert repeats.admits("nvme_read_only", {"reason": "EIO"}, 0.0)
    assert not repeats.admits("nvme_write_failed", {"error": "EIO"}, 0.0)


def test_slow_repetition_is_said_each_time() -> None:
    repeats, now_s = Repeats(), 0.0
    for _ in range(100):
        assert repeats.admits("event", {}, now_s)
        now_s += TOLD_EVERY_S
