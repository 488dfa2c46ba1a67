"""Chunks in the warehouse: where they are, holding, loading, storing, and fetching them from NVMe.

What the warehouse does is never raised, but counted. Each call of the warehouse is bounded by a
slice of time, and by its job's: a daemon that stops is noticed, and so is a job that nobody wants
any more. A load verifies each chunk while it copies it into its row.

Thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import kvwarehouse as kvw
from kvwarehouse_connectors.core.page_store import PageStore, ReasonCounts
from kvwarehouse_connectors.vllm_tier.chunks import Rows, TierChunk, runs
from kvwarehouse_connectors.vllm_tier.jobs import Job, JobOutcome

_LOAD_SLICE_S = 0.25
_STORE_SLICE_S = 1.0
# Of one call. What it copies in one go is what a reset may wait for.
_CALL_KEYS = 4096
_CALL_BYTES = 256 << 20


NEAR = (kvw.Tier.DRAM, kvw.Tier.HBM)
"""As kvw.Tier.near, of one."""


@dataclass(frozen=True)
class GroupChunks:
    """Chunks of one group."""

    chunks: Sequence[TierChunk]

    def __len__(self) -> int:
        return len(self.chunks)

    def runs(self) -> list[kvw.KeyRun]:
        return runs(self.chunks)


class TierPages(PageStore):
    def tier(self, chunk: TierChunk, *, counted: bool) -> int:
        """kvw.Tier of a chunk. Reads shared memory, no call: vLLM's scheduler asks."""
        space = chunk.group.space
        return int(self._tiers(space, GroupChunks([chunk]), counted=counted)[0])

    def hold(self, chunks: Sequence[TierChunk]) -> list[kvw.Pins]:
        """Pins of those that are in DRAM. Reads shared memory, no call. Over the budget of pins
        chunks go unheld, and may be gone when they are loaded."""
        held: list[kvw.Pins] = []
        for batch in _by_group(chunks):
            rest: Sequence[TierChunk] = batch
            while rest:
                pins = self._pin(rest[0].group.space, GroupChunks(rest))
                if pins is None:
                    break
                if pins.pages:
                    held.append(pins)
                rest = rest[pins.pages + 1 :]  # the one between is not in DRAM
        return held

    def load(self, job: Job, rows: Rows, counts: ReasonCounts) -> JobOutcome:
        """Fills the rows of chunks. Those of chunks that are not among the outcome's may then hold
        anything."""
        outcome = JobOutcome(job, [])
        for batch in _by_group(job.chunks):
            rest: Sequence[TierChunk] = batch
            while rest:
                if not job.left_s:
                    counts.why("missed", {"timeout": len(rest)})
                    break
                part = rest[: _chunks_of_call(rest[0])]
                waits_s = min(job.left_s, _LOAD_SLICE_S) if self.alive else 0.0
                space, regions = part[0].group.space, partial(rows.regions, part)
                loaded = self._load(space, GroupChunks(part), regions, waits_s)
                outcome.done += part[:loaded]
                outcome.size_bytes += loaded * space.page_bytes
                rest = rest[loaded:]
                if loaded == len(part) or ("timeout" in loaded.missed and self.alive):
                    continue
                if "unreachable" in loaded.missed:
                    counts.why("missed", {"unreachable": len(rest)})
                    break
                counts.why("missed", {next(iter(loaded.missed), "missing"): 1})
                rest = rest[1:]
        return outcome

    def store(self, job: Job, rows: Rows, counts: ReasonCounts) -> JobOutcome:
        """Chunks that were there already are stored as well."""
        outcome = JobOutcome(job, [])
        for batch in _by_group(job.chunks):
            for begin in range(0, len(batch), _chunks_of_call(batch[0])):
                part = batch[begin : begin + _chunks_of_call(batch[0])]
                stored, dropped = self._store_part(job, part, rows)
                outcome.size_bytes += stored * part[0].group.space.page_bytes
                counts.why("dropped", dropped)
                if not dropped:
                    outcome.done += part
        return outcome

    def fetch(self, job: Job) -> JobOutcome:
        """Brings chunks from NVMe or the remote store to DRAM, and holds them there in the job's
        pins."""
        outcome = JobOutcome(job, [])
        for batch in _by_group(job.chunks):
            rest: Sequence[TierChunk] = batch
            while rest and job.left_s and self.alive:
                began_s, slice_s = time.monotonic(), min(job.left_s, _LOAD_SLICE_S)
                pins = self._pin(rest[0].group.space, GroupChunks(rest), slice_s)
                if pins is None:  # over the budget: what came so far is in DRAM all the same
                    break
                if pins.pages:
                    job.pins.append(pins)
                outcome.done += rest[: pins.pages]
                rest = rest[pins.pages :]
                if not pins.pages and time.monotonic() - began_s < slice_s:
                    rest = rest[1:]  # it does not come, whoever says that it is there
            outcome.done += [chunk for chunk in rest if self.tier(chunk, counted=False) in NEAR]
        return outcome

    def _store_part(
        self, job: Job, part: Sequence[TierChunk], rows: Rows
    ) -> tuple[int, dict[str, int]]:
        """Pages that were written, and those that were dropped, by reason."""
        stored = 0
        while True:
            left_s = job.left_s
            if not left_s or not self.alive:
                return stored, {"timeout" if self.alive else "unreachable": len(part) - stored}
            result = self._store(
                part[0].group.space,
                GroupChunks(part),
                partial(rows.regions, part),
                min(left_s, _STORE_SLICE_S),
            )
            stored += result.stored
            if set(result.dropped) != {"timeout"}:
                return stored, dict(result.dropped)


def _chunks_of_call(chunk: TierChunk) -> int:
    return max(1, min(_CALL_KEYS, _CALL_BYTES // chunk.group.space.page_bytes))


def _by_group(chunks: Sequence[TierChunk]) -> Iterator[list[TierChunk]]:
    """In their order within each group."""
    groups: dict[bytes, list[TierChunk]] = {}
    for chunk in chunks:
        groups.setdefault(chunk.group.space.id, []).append(chunk)
    yield from groups.values()
