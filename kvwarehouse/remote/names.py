"""What objects of a fleet are called in a store (docs/design/remote-tier.md):

    v1/FLEET/NAMESPACE/EPOCH/DAY/HH/KEY     pages; KEY is that of the last one, HH its first byte
    v1/FLEET/epoch/NAMESPACE/EPOCH          a clear: objects of lower epochs are of before it;
                                            NAMESPACE 0: of all namespaces. The last name that
                                            there can be is no clear, and in each whole listing
    v1/FLEET/delta/MILLISECONDS-NODE        what a node has put lately
    v1/FLEET/node/NODE                      that a node lives
    v1/FLEET/janitor/TURN                   that a node cleans up, in these ten minutes
    v1/FLEET/probe/NUMBER                   what was put to see what the store does

FLEET, NAMESPACE, KEY: 32 hex digits, of the 16 bytes as they are stored. EPOCH, NODE, NUMBER: 16
hex digits of a number. DAY, TURN: days, and ten minutes, since 1970. MILLISECONDS: 13 digits, since
1970. All by the store's clock. A name is made in one way only, so that listings are in the order of
epochs and times; what is not made so is no name. Stateless; thread-safe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

EPOCH_MAX: Final = (1 << 64) - 1
DAY_MAX: Final = (1 << 31) - 1
MILLISECONDS_MAX: Final = 10**13 - 1
ID_BYTES: Final = 16
EVERYTHING: Final = bytes(ID_BYTES)
"""In place of a namespace: all of them. Their ids are digests, so none has it."""

_ID: Final = "([0-9a-f]{32})"
_NUMBER: Final = "([0-9a-f]{16})"
_DAY: Final = "(0|[1-9][0-9]{0,9})"
_PAGES: Final = re.compile(f"{_ID}/{_NUMBER}/{_DAY}/([0-9a-f]{{2}})/{_ID}", re.ASCII)
_EPOCH: Final = re.compile(f"epoch/{_ID}/{_NUMBER}", re.ASCII)
_DELTA: Final = re.compile(f"delta/([0-9]{{13}})-{_NUMBER}", re.ASCII)
_NODE: Final = re.compile(f"node/{_NUMBER}", re.ASCII)
_TURN: Final = re.compile(f"janitor/{_DAY}", re.ASCII)
_PROBE: Final = re.compile(f"probe/{_NUMBER}", re.ASCII)
_PREFIX: Final = re.compile(
    f"(?:{_ID}/(?:{_NUMBER}/(?:{_DAY}/(?:([0-9a-f]{{2}})/)?)?)?)?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class PagesName:
    """An object of pages. `namespace`, `key`: 16 bytes."""

    namespace: bytes
    epoch: int
    day: int
    key: bytes


@dataclass(frozen=True, slots=True)
class PagesPrefix:
    """What objects of pages have in common, from left to right; None from where they differ."""

    namespace: bytes | None = None
    epoch: int | None = None
    day: int | None = None
    first_byte: int | None = None
    """Of their keys."""


class FleetNames:
    """Names of one fleet's objects. `fleet`: 16 bytes."""

    def __init__(self, fleet: bytes) -> None:
        self.fleet: Final = fleet
        self.root: Final = f"v1/{_hex(fleet)}/"
        """Ends at a slash, as all prefixes do."""

    # --- pages

    def pages(self, name: PagesName) -> str:
        key = _hex(name.key)
        return f"{self.pages_prefix(name.namespace, name.epoch, name.day)}{key[:2]}/{key}"

    def pages_prefix(
        self, namespace: bytes, epoch: int | None = None, day: int | None = None
    ) -> str:
        """Of a namespace's objects; of one epoch; of one day of it."""
        prefix = f"{self.root}{_hex(namespace)}/"
        if epoch is not None:
            prefix += f"{_number(epoch)}/"
            if day is not None:
                prefix += f"{_bounded('day', day, DAY_MAX)}/"
        return prefix

    def pages_of(self, path: str) -> PagesName | None:
        """None: not an object of pages of this fleet."""
        found = self._match(_PAGES, path)
        if found is None or found[4][:2] != found[3] or int(found[2]) > DAY_MAX:
            return None
        namespace, epoch, day, _, key = found
        return PagesName(bytes.fromhex(namespace), int(epoch, 16), int(day), bytes.fromhex(key))

    def pages_prefix_of(self, prefix: str) -> PagesPrefix | None:
        """Of a prefix that ends at a slash. None: no objects of pages of this fleet are below."""
        found = self._match(_PREFIX, prefix)
        if found is None:
            return None
        namespace, epoch, day, first_byte = found
        if day is not None and int(day) > DAY_MAX:
            return None
        return PagesPrefix(
            None if namespace is None else bytes.fromhex(namespace),
            None if epoch is None else int(epoch, 16),
            None if day is None else int(day),
            None if first_byte is None else int(first_byte, 16),
        )

    # --- clears

    @property
    def epochs_prefix(self) -> str:
        return f"{self.root}epoch/"

    def epoch(self, namespace: bytes, epoch: int) -> str:
        return f"{self.epochs_prefix}{_hex(namespace)}/{_number(epoch)}"

    def epoch_of(self, path: str) -> tuple[bytes, int] | None:
        """Namespace and epoch. None: not a clear of this fleet."""
        found = self._match(_EPOCH, path)
        return (bytes.fromhex(found[0]), int(found[1], 16)) if found else None

    @property
    def epochs_sentinel(self) -> str:
        """The last name among clears, which is none: hosts know none of so high an epoch."""
        return self.epoch(b"\xff" * ID_BYTES, EPOCH_MAX)

    # --- deltas and nodes

    @property
    def deltas_prefix(self) -> str:
        return f"{self.root}delta/"

    def delta(self, milliseconds: int, node: int) -> str:
        time = _bounded("milliseconds", milliseconds, MILLISECONDS_MAX)
        return f"{self.deltas_prefix}{time:013}-{_number(node)}"

    def deltas_after(self, milliseconds: int) -> str:
        """The name that all deltas of this time and later lie behind, in the order of names."""
        time = _bounded("milliseconds", milliseconds, MILLISECONDS_MAX)
        return f"{self.deltas_prefix}{time:013}"

    def delta_of(self, path: str) -> tuple[int, int] | None:
        """Milliseconds and node. None: not a delta of this fleet."""
        found = self._match(_DELTA, path)
        return (int(found[0]), int(found[1], 16)) if found else None

    @property
    def nodes_prefix(self) -> str:
        return f"{self.root}node/"

    def node(self, node: int) -> str:
        return f"{self.nodes_prefix}{_number(node)}"

    def node_of(self, path: str) -> int | None:
        found = self._match(_NODE, path)
        return int(found[0], 16) if found else None

    # --- turns of the janitor, probes

    @property
    def turns_prefix(self) -> str:
        return f"{self.root}janitor/"

    def turn(self, turn: int) -> str:
        return f"{self.turns_prefix}{_bounded('turn', turn, DAY_MAX)}"

    def turn_of(self, path: str) -> int | None:
        found = self._match(_TURN, path)
        return int(found[0]) if found and int(found[0]) <= DAY_MAX else None

    @property
    def probes_prefix(self) -> str:
        return f"{self.root}probe/"

    def probe_of(self, path: str) -> int | None:
        found = self._match(_PROBE, path)
        return int(found[0], 16) if found else None

    def _match(self, pattern: re.Pattern[str], path: str) -> tuple[Any, ...] | None:
        if not path.startswith(self.root):
            return None
        found = pattern.fullmatch(path, len(self.root))
        return found.groups() if found else None


def _hex(value: bytes) -> str:
    if len(value) != ID_BYTES:
        raise ValueError(f"an id or a key has {ID_BYTES} bytes, not {len(value)}")
    return value.hex()


def _number(value: int) -> str:
    return f"{_bounded('number', value, EPOCH_MAX):016x}"


def _bounded(what: str, value: int, most: int) -> int:
    if not 0 <= value <= most:
        raise ValueError(f"{what} is {value}; names have 0 to {most}")
    return value
