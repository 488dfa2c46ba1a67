"""What objects are called in a store, and the deltas that name them."""

from __future__ import annotations

import hashlib
import random
import struct

import pytest

from kvwarehouse.remote import delta as delta_format
from kvwarehouse.remote.delta import Delta, DeltaEntry
from kvwarehouse.remote.names import DAY_MAX, EPOCH_MAX, FleetNames, PagesName, PagesPrefix

FLEET = bytes(range(16))
NAMES = FleetNames(FLEET)
NAME = PagesName(b"n" * 16, 5, 20785, bytes(range(0xA0, 0xB0)))


def some_name(rng: random.Random) -> PagesName:
    return PagesName(
        rng.randbytes(16), rng.getrandbits(64), rng.randint(0, DAY_MAX), rng.randbytes(16)
    )


def test_name_of_pages_is_what_it_always_was() -> None:
    assert NAMES.pages(NAME) == (
        "v1/000102030405060708090a0b0c0d0e0f/6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e/"
        "0000000000000005/20785/a0/a0a1a2a3a4a5a6a7a8a9aaabacadaeaf"
    )


def test_names_come_back_as_they_went(rng: random.Random) -> None:
    names = [NAME, PagesName(b"n" * 16, 0, 0, b"k" * 16)]
    names += [PagesName(b"n" * 16, EPOCH_MAX, DAY_MAX, b"k" * 16)]
    for name in names + [some_name(rng) for _ in range(200)]:
        path = NAMES.pages(name)
        assert NAMES.pages_of(path) == name
        assert path.startswith(NAMES.pages_prefix(name.namespace, name.epoch, name.day))
        assert path.startswith(NAMES.pages_prefix(name.namespace, name.epoch))
        assert path.startswith(NAMES.pages_prefix(name.namespace))
    assert NAMES.epoch_of(NAMES.epoch(b"n" * 16, 77)) == (b"n" * 16, 77)
    assert NAMES.delta_of(NAMES.delta(1764300000123, 0xABC)) == (1764300000123, 0xABC)
    assert NAMES.node_of(NAMES.node(EPOCH_MAX)) == EPOCH_MAX
    assert NAMES.turn_of(NAMES.turn(2940500)) == 2940500
    assert NAMES.probe_of(f"{NAMES.probes_prefix}{77:016x}") == 77


def test_names_of_one_kind_are_none_of_another() -> None:
    paths = {
        "pages": NAMES.pages(NAME),
        "epoch": NAMES.epoch(NAME.namespace, 5),
        "delta": NAMES.delta(1, 2),
        "node": NAMES.node(3),
        "turn": NAMES.turn(4),
        "probe": f"{NAMES.probes_prefix}{5:016x}",
    }
    readers = {
        "pages": NAMES.pages_of,
        "epoch": NAMES.epoch_of,
        "delta": NAMES.delta_of,
        "node": NAMES.node_of,
        "turn": NAMES.turn_of,
        "probe": NAMES.probe_of,
    }
    for kind, path in paths.items():
        for reader, read in readers.items():
            assert (read(path) is not None) == (kind == reader)


def test_prefixes_of_pages_say_what_is_below_them() -> None:
    space, epoch, day = NAME.namespace, NAME.epoch, NAME.day
    for prefix, said in {
        NAMES.root: PagesPrefix(),
        NAMES.pages_prefix(space): PagesPrefix(space),
        NAMES.pages_prefix(space, epoch): PagesPrefix(space, epoch),
        NAMES.pages_prefix(space, epoch, day): PagesPrefix(space, epoch, day),
        f"{NAMES.pages_prefix(space, epoch, day)}a0/": PagesPrefix(space, epoch, day, 0xA0),
    }.items():
        assert NAMES.pages_prefix_of(prefix) == said
        assert NAMES.pages_prefix_of(prefix[:-1]) is None
    whole = NAMES.pages_prefix(space, epoch, day)
    for other in ("node/", "delta/", "epoch/", "janitor/", "probe/", "else/"):
        assert NAMES.pages_prefix_of(NAMES.root + other) is None
    for bad in (f"{whole}A0/", f"{whole}a0/a0/", whole.replace("20785", "2147483648"), "v1/"):
        assert NAMES.pages_prefix_of(bad) is None
    assert FleetNames(bytes(16)).pages_prefix_of(whole) is None


def test_name_of_another_fleet_is_none_of_ours() -> None:
    others = FleetNames(bytes(16))
    assert NAMES.pages_of(others.pages(NAME)) is None
    assert NAMES.epoch_of(others.epoch(NAME.namespace, 5)) is None


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ("/a0/", "/a1/"),  # the key's own first byte
        ("/20785/", "/020785/"),
        ("/20785/", "/-1/"),
        ("/20785/", "/2147483648/"),
        ("/20785/", "/٢٠٧٨٥/"),  # digits, and none of ours
        ("/0000000000000005/", "/5/"),
        ("a0a1a2", "A0A1A2"),
        ("aeaf", "aeaf00"),
        ("aeaf", "aeaf\n"),
        ("aeaf", "aeaf.tmp"),
        ("v1/", "v2/"),
        ("v1/", "/v1/"),
    ],
)
def test_what_is_not_made_as_a_name_is_none(part: str, instead: str) -> None:
    path = NAMES.pages(NAME)
    assert part in path
    assert NAMES.pages_of(path.replace(part, instead)) is None


def test_listing_has_epochs_and_deltas_in_their_order(rng: random.Random) -> None:
    epochs = sorted(rng.getrandbits(rng.randint(1, 64)) for _ in range(50))
    paths = [NAMES.epoch(NAME.namespace, epoch) for epoch in epochs]
    assert paths == sorted(paths)
    times = sorted(rng.randint(0, 10**13 - 1) for _ in range(50))
    deltas = [NAMES.delta(time, rng.getrandbits(64)) for time in times]
    assert deltas == sorted(deltas)
    behind = [path for path in deltas if path > NAMES.deltas_after(times[25])]
    assert behind == deltas[25:]


@pytest.mark.parametrize(
    "name",
    [
        PagesName(b"n" * 16, -1, 0, b"k" * 16),
        PagesName(b"n" * 16, EPOCH_MAX + 1, 0, b"k" * 16),
        PagesName(b"n" * 16, 0, DAY_MAX + 1, b"k" * 16),
        PagesName(b"n" * 15, 0, 0, b"k" * 16),
        PagesName(b"n" * 16, 0, 0, b"k" * 17),
    ],
)
def test_name_that_would_not_come_back_is_not_made(name: PagesName) -> None:
    with pytest.raises(ValueError, match=r"has 16 bytes|names have 0 to"):
        NAMES.pages(name)


def some_delta(rng: random.Random, entries: int) -> Delta:
    return Delta(
        rng.getrandbits(64),
        rng.getrandbits(64),
        [DeltaEntry(some_name(rng), rng.getrandbits(32)) for _ in range(entries)],
    )


@pytest.mark.parametrize("entries", [0, 1, 100, delta_format.ENTRIES_MAX])
def test_delta_comes_back_as_it_went(entries: int, rng: random.Random) -> None:
    delta = some_delta(rng, entries)
    data = delta_format.encode(FLEET, delta)
    assert len(data) <= delta_format.DELTA_BYTES_MAX
    assert delta_format.decode(FLEET, data) == delta
    assert delta_format.decode(FLEET, memoryview(data)) == delta


def test_delta_that_is_flipped_cut_or_of_another_fleet_is_none(rng: random.Random) -> None:
    data = bytearray(delta_format.encode(FLEET, some_delta(rng, 3)))
    assert delta_format.decode(bytes(16), bytes(data)) is None
    for at in range(len(data)):
        data[at] ^= 1 << rng.randrange(8)
        assert delta_format.decode(FLEET, bytes(data)) is None
        data = bytearray(delta_format.encode(FLEET, some_delta(rng, 3)))
        assert delta_format.decode(FLEET, bytes(data[:at])) is None
    assert delta_format.decode(FLEET, bytes(data) + b"\0") is None


def test_delta_that_lies_about_its_length_or_version_is_none(rng: random.Random) -> None:
    """With a digest that holds."""
    good = delta_format.encode(FLEET, some_delta(rng, 3))[:-32]
    lies = [(8, "<I", 2), (8, "<I", 0), (0, "<Q", 0)]
    lies += [(12, "<I", count) for count in (0, 2, 4, delta_format.ENTRIES_MAX + 1, 2**32 - 1)]
    for at, form, value in lies:
        body = bytearray(good)
        struct.pack_into(form, body, at, value)
        data = bytes(body) + hashlib.blake2b(body, digest_size=32).digest()
        assert delta_format.decode(FLEET, data) is None
    for short in (b"", good[:47]):
        data = short + hashlib.blake2b(short, digest_size=32).digest()
        assert delta_format.decode(FLEET, data) is None
    assert delta_format.decode(FLEET, good + hashlib.blake2b(good, digest_size=32).digest())


def test_delta_of_too_many_entries_is_not_made(rng: random.Random) -> None:
    delta = some_delta(rng, delta_format.ENTRIES_MAX + 1)
    with pytest.raises(ValueError, match="8193 entries"):
        delta_format.encode(FLEET, delta)
