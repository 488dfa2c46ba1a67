"""What a namespace is asked for, as values: a prompt and a part of it. Every argument is checked
once, when the request is made, whatever transport takes it then.

Immutable; thread-safe as the caller's buffers are.
"""

from __future__ import annotations

import operator
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.client.endpoint import checked_timeout
from kvwarehouse.client.pins import Pins
from kvwarehouse.client.prompt import Keys, Prefix, Runs, prefix_of
from kvwarehouse.client.regions import Regions, rows_of
from kvwarehouse.errors import UsageError
from kvwarehouse.types import Loaded, Match, Namespace

_LAST_EPOCH: Final = (1 << 64) - 1


class LookupRequest(NamedTuple):
    """How much of a prompt is stored."""

    space: Namespace
    prefix: Prefix

    @classmethod
    def checked(cls, space: Namespace, tokens: Any, keys: Keys | None) -> Self:
        """Raises UsageError as prefix_of does."""
        return cls(space, prefix_of(space, tokens, keys))

    def match(self, hbm: int, dram: int, nvme: int, remote: int) -> Match:
        """The answer, of pages by tier."""
        pages = hbm + dram + nvme + remote
        by_tier = {"hbm": hbm, "dram": dram, "nvme": nvme, "remote": remote}
        return Match(pages, pages * self.space.page_tokens, by_tier)

    def missed(self) -> Match:
        """The answer where nothing is stored; so for the other requests."""
        return self.match(0, 0, 0, 0)


class TiersRequest(NamedTuple):
    """Where each page of a prompt is."""

    space: Namespace
    prefix: Prefix
    counted: bool
    """As a lookup."""

    def missed(self) -> NDArray[np.uint8]:
        return np.zeros(self.prefix.pages, np.uint8)


class ReleaseRequest(NamedTuple):
    """Pages that are needed no more: those from `first` on."""

    space: Namespace
    prefix: Prefix
    first: int

    @classmethod
    def checked(cls, space: Namespace, tokens: Any, keys: Keys | None, first: int) -> Self:
        """Raises UsageError."""
        prefix = prefix_of(space, tokens, keys)
        return cls(space, prefix, _checked_first(first, prefix))

    def missed(self) -> int:
        return 0


class LoadRequest(NamedTuple):
    """One shard of the pages from `first` on, as many as `out` has."""

    space: Namespace
    prefix: Prefix
    first: int
    shard: int
    out: Regions
    timeout_s: float

    @classmethod
    def checked(  # noqa: PLR0913  the arguments of OpenNamespace.load
        cls,
        space: Namespace,
        tokens: Any,
        keys: Keys | None,
        out: Any,
        first: int,
        shard: int,
        timeout_s: float,
    ) -> Self:
        """`out` is cut to the pages of the prompt. Raises UsageError."""
        prefix = prefix_of(space, tokens, keys)
        first = _checked_first(first, prefix)
        shard = _checked_shard(shard, space)
        regions = _checked_regions(space, out, "out", writable=True)
        regions = regions.head(min(regions.count, prefix.pages - first))
        return cls(space, prefix, first, shard, regions, checked_timeout(timeout_s))

    def part(self, at: int, pages: int, timeout_s: float) -> Self:
        """A load of `pages` of these pages, from the one with the number `at` among them on."""
        return self._replace(
            first=self.first + at, out=self.out.part(at, pages), timeout_s=timeout_s
        )

    def missed(self, reason: str = "missing") -> Loaded:
        pages = self.out.count
        return Loaded(0, {reason: pages} if pages else None)


class StoreRequest(NamedTuple):
    """One shard of every page from `first` on."""

    space: Namespace
    prefix: Prefix
    first: int
    shard: int
    pages: Regions
    timeout_s: float
    since_epoch: int | None = None
    """The clear epoch that the pages belong to."""

    @classmethod
    def checked(  # noqa: PLR0913  the arguments of OpenNamespace.store
        cls,
        space: Namespace,
        tokens: Any,
        keys: Keys | None,
        pages: Any,
        first: int,
        shard: int,
        timeout_s: float,
        since_epoch: int | None,
    ) -> Self:
        """Raises UsageError."""
        prefix = prefix_of(space, tokens, keys)
        first = _checked_first(first, prefix)
        shard = _checked_shard(shard, space)
        timeout_s = checked_timeout(timeout_s)
        if since_epoch is not None:
            why = "it is the clear_epoch of a listed namespace"
            since_epoch = _index("since_epoch", since_epoch, _LAST_EPOCH, why)
        regions = _checked_regions(space, pages, "pages", writable=False)
        _check_count(regions.count, prefix, first)
        return cls(space, prefix, first, shard, regions, timeout_s, since_epoch)


class PinRequest(NamedTuple):
    """A hold on the longest stored prefix, from page `first` on."""

    space: Namespace
    prefix: Prefix
    first: int
    timeout_s: float

    @classmethod
    def checked(
        cls, space: Namespace, tokens: Any, keys: Keys | None, first: int, timeout_s: float
    ) -> Self:
        """Raises UsageError."""
        prefix = prefix_of(space, tokens, keys)
        return cls(space, prefix, _checked_first(first, prefix), checked_timeout(timeout_s))

    def missed(self) -> Pins:
        return Pins(None)


def _checked_first(first: int, prefix: Prefix) -> int:
    """`first`, a page of the prefix or its end; runs are passed from where they begin. Raises
    UsageError (code "bad_first")."""
    if isinstance(prefix.keys, Runs) and first != 0:
        raise UsageError(
            f"first = {first!r} together with KeyRuns; pass runs that begin at the page you mean",
            code="bad_first",
            context={"first": first},
        )
    return _index("first", first, prefix.pages, "the prefix has {} whole pages")


def _checked_shard(shard: int, space: Namespace) -> int:
    """Raises UsageError (code "bad_shard")."""
    return _index("shard", shard, space.shards - 1, "the namespace's last shard is {}")


def _index(name: str, value: int, largest: int, why: str) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= largest:
        raise UsageError(
            f"{name} = {value!r} is not a number from 0 to {largest}: {why.format(largest)}",
            code=f"bad_{name}",
            context={name: value, "largest": largest},
        )
    return number


def _checked_regions(space: Namespace, pages: Any, name: str, *, writable: bool) -> Regions:
    """Raises UsageError (code "bad_pages"); "read_only_buffer" of Regions that the call may not
    write to."""
    if pages is None:
        raise UsageError(
            f"{name} is missing; pass uint8 (n, {space.page_bytes}) or Regions", code="bad_pages"
        )
    if not isinstance(pages, Regions):
        return rows_of(pages, space.page_bytes, writable=writable).behind_streams()
    if pages.page_bytes != space.page_bytes:
        raise UsageError(
            f"{name} has pages of {pages.page_bytes} bytes; expected {space.page_bytes}",
            code="bad_pages",
        )
    if writable and not pages.writable:
        raise UsageError(
            f"{name} is read-only and the load writes to it; make it by Regions.rows(array,"
            " writable=True)",
            code="read_only_buffer",
        )
    return pages.behind_streams()


def _check_count(given: int, prefix: Prefix, first: int) -> None:
    expected = prefix.pages - first
    if given != expected:
        what = "keys" if prefix.tokens is None else f"whole pages of {len(prefix.tokens)} tokens"
        raise UsageError(
            f"pages has {given} pages; expected {expected} ({prefix.pages} {what}, from page"
            f" {first})",
            code="bad_pages",
            context={"expected": expected, "given": given},
        )
