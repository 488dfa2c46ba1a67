"""The longest prefix of a request that the warehouse has in all of a model's cache groups.

Reads shared memory only; a first block that is missing costs microseconds. One per engine; not
thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import DaemonConnection
from kvwarehouse_connectors.core.groups import CacheGroup
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.prompt_keeper import KeepPart

# Blocks asked for at first, and how fast that grows: a miss must not pay for a long prompt.
_FIRST_ASK = 8
_GROWTH = 8
# Questions end where objects of the remote store may, which have a power of two of blocks and at
# most so many tokens (native/remote/object.h): blocks of one that is asked for in part are missing.
OBJECT_TOKENS = 256
# Blocks of a group without a chain that are asked for at once, from the end.
_BACK_ASK = 32
# Of a group, in a request's note.
_BLOCKS_NOTED = 8


class BlockKeys(Protocol):
    """The keys of a request's blocks; block_hashes: hashes of the engine's in one block."""

    def count(self, block_hashes: int) -> int:
        """Whole blocks whose tokens are all known."""
        ...

    def keys(self, begin: int, end: int, block_hashes: int) -> Sequence[bytes]:
        """Of blocks begin to end - 1; each names its whole prefix."""
        ...


@dataclass(frozen=True)
class GroupHit:
    """Blocks begin to end - 1 of a request in one group, and where each is stored now."""

    place: int
    """Of the group in the list of groups."""
    begin: int
    end: int
    tiers: NDArray[np.uint8]

    def cut(self, begin: int, end: int) -> GroupHit:
        return GroupHit(self.place, begin, end, self.tiers[begin - self.begin : end - self.begin])


@dataclass
class PrefixHit:
    """A prefix of `tokens` tokens, of which the engine has the first `local_tokens` itself."""

    local_tokens: int
    tokens: int
    groups: tuple[GroupHit, ...]
    """What has to be loaded, group by group."""
    pins: list[kvw.Pins] = field(default_factory=list)

    @property
    def dram_share(self) -> float:
        """Of the blocks to load."""
        return self._share([kvw.Tier.DRAM, kvw.Tier.HBM], 1.0)

    @property
    def remote_share(self) -> float:
        """Likewise: of those that only the remote store has, as far as is known."""
        return self._share([kvw.Tier.REMOTE], 0.0)

    def release(self) -> None:
        for pins in self.pins:
            pins.release()
        self.pins = []

    def _share(self, tiers: Sequence[kvw.Tier], of_nothing: float) -> float:
        blocks = sum(len(group_hit.tiers) for group_hit in self.groups)
        found = sum(int(np.isin(group_hit.tiers, tiers).sum()) for group_hit in self.groups)
        return found / blocks if blocks else of_nothing


class PrefixMatcher:
    """opened: one namespace for each group, in their order. Errors of the warehouse pass through:
    UsageError where the daemon does not know a namespace any more."""

    def __init__(
        self, groups: Sequence[CacheGroup], opened: Sequence[kvw.OpenNamespace], align_tokens: int
    ) -> None:
        self._groups = groups
        self._opened = opened
        self._align = align_tokens

    @staticmethod
    def at_daemon(
        connection: DaemonConnection,
        groups: Sequence[CacheGroup],
        spaces: Sequence[kvw.Namespace],
        align_tokens: int,
    ) -> PrefixMatcher | None:
        """spaces: one for each group. None while there is no daemon that knows them. Never
        blocks."""
        opened = [connection.namespace(space) for space in spaces]
        if not opened or None in opened:
            return None
        return PrefixMatcher(groups, opened, align_tokens)  # type: ignore[arg-type]  # none is None

    @property
    def opened(self) -> Sequence[kvw.OpenNamespace]:
        """The namespaces that it looks into, one for each group."""
        return self._opened

    def find(self, keys: BlockKeys, local_tokens: int, limit_tokens: int) -> PrefixHit | None:
        """The longest prefix beyond local_tokens and of at most limit_tokens; None where there is
        none. It ends at a whole number of blocks in every group."""
        end = self._whole(limit_tokens)
        for group in self._groups:
            end = min(end, self._whole(keys.count(group.block_hashes) * group.block_tokens))
        chains: list[GroupHit] = []
        for place, group in enumerate(self._groups):
            if end <= local_tokens:
                return None
            if group.chained:
                group_hit = self._chain(place, keys, local_tokens // group.block_tokens, end)
                chains.append(group_hit)
                end = self._whole(group_hit.end * group.block_tokens)
        tails = self._tails(keys, local_tokens, end)
        if tails is None:
            return None
        end, tail_hits = tails
        heads = [
            group_hit.cut(group_hit.begin, end // self._groups[group_hit.place].block_tokens)
            for group_hit in chains
        ]
        return PrefixHit(local_tokens, end, (*heads, *tail_hits)) if end > local_tokens else None

    def pin(self, hit: PrefixHit, keys: BlockKeys) -> None:
        """Holds what of the hit is in DRAM, from the front of each group; as far as the budget
        goes."""
        for group_hit in hit.groups:
            group = self._groups[group_hit.place]
            run = page_run(
                group_hit.place, group, keys, range(group_hit.begin, group_hit.end), None
            )
            try:
                hit.pins.append(
                    self._opened[group_hit.place].pin(keys=run.key_runs(), timeout_s=0.0)
                )
            except kvw.PinError:
                return  # loads are verified, pinned or not

    def missing(self, place: int, keys: BlockKeys, wanted: Sequence[int]) -> list[int]:
        """Those of the blocks `wanted` that are not stored here, whatever the remote store has."""
        run = page_run(place, self._groups[place], keys, wanted, None)
        tiers = self._opened[place].tiers(keys=run.key_runs(), counted=False)
        return [block for block, here in zip(wanted, kvw.Tier.here(tiers), strict=True) if not here]

    def note(
        self,
        request_id: str,
        keys: BlockKeys,
        tokens: int,
        local_tokens: int,
        limit_tokens: int,
        hit: PrefixHit | None,
    ) -> kvw.RequestNote:
        """What was just found of a request: `hit` of find(), all of which is to be loaded. tokens:
        of its prompt."""
        found = hit.tokens if hit is not None else local_tokens
        return kvw.RequestNote(
            request_id,
            tokens=tokens,
            engine_tokens=local_tokens,
            found_tokens=found,
            load_tokens=found,
            at_ns=time.time_ns(),
            missing=tuple(self._behind(keys, found, limit_tokens)),
        )

    def _behind(
        self, keys: BlockKeys, found_tokens: int, limit_tokens: int
    ) -> Iterator[kvw.MissingPages]:
        """The first blocks of each chain behind what was found of a prompt, a few of them."""
        note = kvw.RequestNote
        chains = [place for place, group in enumerate(self._groups) if group.chained]
        each = min(_BLOCKS_NOTED, note.MAX_KEYS // max(1, len(chains)))
        for place in chains[: note.MAX_NAMESPACES]:
            group = self._groups[place]
            begin = found_tokens // group.block_tokens
            known = min(keys.count(group.block_hashes), limit_tokens // group.block_tokens)
            end = min(known, begin + each)
            if begin < end:
                run = page_run(place, group, keys, range(begin, end), None)
                yield kvw.MissingPages(self._opened[place].space.id, run.key_runs()[0])

    def to_keep(self, keys: BlockKeys, tokens: int, ends_tokens: Sequence[int]) -> list[KeepPart]:
        """The blocks of a request's first `tokens` tokens that computing on from one of
        `ends_tokens` needs."""
        parts = []
        for group, opened in zip(self._groups, self._opened, strict=True):
            known = min(keys.count(group.block_hashes), tokens // group.block_tokens)
            space_id = opened.space.id
            if group.chained:
                if known:
                    parts.append(KeepPart(space_id, keys.keys(0, known, group.block_hashes)))
                continue
            blocks: set[int] = set()
            for end_tokens in ends_tokens:
                end = min(known, self._whole(end_tokens) // group.block_tokens)
                blocks.update(range(group.first_needed(end * group.block_tokens), end))
            lone = page_run(0, group, keys, sorted(blocks), None)
            if lone.keys:
                parts.append(KeepPart(space_id, lone.key_runs()))
        return parts

    def release(self, keys: BlockKeys) -> int:
        """Says of all stored blocks of a request that they are needed no more. Returns how many."""
        count = 0
        for place, (group, opened) in enumerate(zip(self._groups, self._opened, strict=True)):
            run = page_run(place, group, keys, range(keys.count(group.block_hashes)), None)
            count += opened.release(keys=run.key_runs()) if run.keys else 0
        return count

    def _chain(self, place: int, keys: BlockKeys, begin: int, end_tokens: int) -> GroupHit:
        """As far as the chain from block `begin` on is stored, at most to end_tokens."""
        group = self._groups[place]
        end = end_tokens // group.block_tokens
        whole = _most_blocks(group.block_tokens)
        found: list[NDArray[np.uint8]] = []
        at, ask = begin, _FIRST_ASK
        while at < end:
            until = min(end, -(-(at + ask) // whole) * whole)
            run = page_run(place, group, keys, range(at, until), None)
            tiers = self._opened[place].tiers(keys=run.key_runs())
            there = int(np.argmin(tiers != 0)) if not tiers.all() else len(tiers)
            found.append(tiers[:there])
            at += there
            if at < until:
                break
            ask *= _GROWTH
        return GroupHit(place, begin, at, np.concatenate(found) if found else np.empty(0, np.uint8))

    def _tails(
        self, keys: BlockKeys, local_tokens: int, end: int
    ) -> tuple[int, list[GroupHit]] | None:
        """The largest end, not beyond `end`, at which every group without a chain has what it
        needs; and what that is."""
        tails = {
            place: _Backwards(self._opened[place], group, keys, end // group.block_tokens)
            for place, group in enumerate(self._groups)
            if not group.chained
        }
        while end > local_tokens:
            group_hits = []
            for place, tail in tails.items():
                group = self._groups[place]
                first = max(group.first_needed(end), local_tokens // group.block_tokens)
                gap = tail.last_gap(first, end // group.block_tokens)
                if gap is not None:
                    # No end behind the gap and up to here can do without it.
                    end = self._whole(gap * group.block_tokens)
                    break
                group_hits.append(tail.group_hit(place, first, end // group.block_tokens))
            else:
                return end, group_hits
        return None

    def _whole(self, tokens: int) -> int:
        return tokens // self._align * self._align


def _most_blocks(block_tokens: int) -> int:
    """The largest power of two of blocks that an object may have."""
    return 1 << max(1, OBJECT_TOKENS // block_tokens).bit_length() - 1


def load_runs(
    groups: Sequence[CacheGroup], hit: PrefixHit, keys: BlockKeys, tables: Sequence[Sequence[int]]
) -> tuple[PageRun, ...]:
    """What to load of a hit into the blocks of `tables`, one for each of the engine's groups.
    Blocks that the engine left out of a table (id 0) are left out."""
    found = []
    for group_hit in hit.groups:
        group = groups[group_hit.place]
        table = tables[group.index]
        wanted: Sequence[int] = range(group_hit.begin, group_hit.end)
        if not group.chained:
            wanted = [block for block in wanted if table[block]]
        found.append(page_run(group_hit.place, group, keys, wanted, table))
    return tuple(run for run in found if run.keys)


class _Backwards:
    """Where the blocks of a group without a chain are, asked for from the end on, in pieces."""

    def __init__(
        self, opened: kvw.OpenNamespace, group: CacheGroup, keys: BlockKeys, end: int
    ) -> None:
        self._opened = opened
        self._group = group
        self._keys = keys
        self._tiers = np.zeros(end, np.uint8)
        self._known_from = end

    def last_gap(self, begin: int, end: int) -> int | None:
        """The last block in begin .. end - 1 that is not stored."""
        while self._known_from > begin:
            until = self._known_from
            since = max(0, min(begin, until - _BACK_ASK))
            keys = self._keys.keys(since, until, self._group.block_hashes)
            self._tiers[since:until] = self._opened.tiers(keys=[kvw.KeyRun([key]) for key in keys])
            self._known_from = since
        gaps = np.flatnonzero(self._tiers[begin:end] == 0)
        return begin + int(gaps[-1]) if len(gaps) else None

    def group_hit(self, place: int, begin: int, end: int) -> GroupHit:
        return GroupHit(place, begin, end, self._tiers[begin:end])


def page_run(
    place: int,
    group: CacheGroup,
    keys: BlockKeys,
    wanted: Sequence[int],
    table: Sequence[int] | None,
) -> PageRun:
    """The blocks `wanted` of a request; consecutive ones where the group is chained."""
    each = group.block_hashes
    blocks = [table[block] for block in wanted] if table is not None else []
    if not group.chained:
        lone = [keys.keys(block, block + 1, each)[0] for block in wanted]
        return PageRun(place, lone, blocks, False)
    if not wanted:
        return PageRun(place, [], [], True)
    begin, end = wanted[0], wanted[-1] + 1
    parent = keys.keys(begin - 1, begin, each)[0] if begin else None
    return PageRun(place, keys.keys(begin, end, each), blocks, True, begin, parent)


def consecutive(blocks: Sequence[int]) -> Iterator[range]:
    """The runs of consecutive numbers in a rising sequence."""
    begin = 0
    for place in range(1, len(blocks) + 1):
        if place == len(blocks) or blocks[place] != blocks[place - 1] + 1:
            yield range(blocks[begin], blocks[place - 1] + 1)
            begin = place
