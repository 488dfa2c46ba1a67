"""What the demo found, and whether it is what must be. Immutable; thread-safe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvwarehouse_connectors.transformers.demo.pace import Pace
from kvwarehouse_connectors.transformers.demo.sample import Sample

WAYS = ("dram", "dram_after_kill", "nvme")
"""Where a prompt's document is loaded from, in the order of the columns."""


@dataclass(frozen=True)
class Cell:
    """One prompt, answered several times in one way. Only the first run has the whole answer."""

    runs: tuple[Sample, ...]

    @property
    def first_token_s(self) -> float:
        """Of the better run: other work on the machine only ever makes a run slower."""
        return min(sample.first_token_s for sample in self.runs)

    @property
    def answer(self) -> tuple[int, ...]:
        return self.runs[0].answer


@dataclass(frozen=True)
class Row:
    """One prompt, answered four ways. expected_tokens: what the warehouse has of it on the grid."""

    prompt_tokens: int
    expected_tokens: int
    page_tokens: int
    computed: Cell
    dram: Cell
    dram_after_kill: Cell
    nvme: Cell

    @property
    def loaded(self) -> dict[str, Cell]:
        return {way: getattr(self, way) for way in WAYS}

    @property
    def runs(self) -> int:
        return len(self.computed.runs)

    @property
    def reused(self) -> list[Sample]:
        """Every run in which the warehouse was asked."""
        return [sample for cell in self.loaded.values() for sample in cell.runs]

    @property
    def slower(self) -> bool:
        """True where some way to load was no faster than computing."""
        limit_s = self.computed.first_token_s
        return any(cell.first_token_s >= limit_s for cell in self.loaded.values())

    @property
    def logits_equal(self) -> bool:
        """True where all runs of all four columns have the same logits, bit for bit."""
        first = self.computed.runs[0]
        return all(sample.same_logits(first) for sample in [*self.computed.runs, *self.reused])

    @property
    def bytes_equal(self) -> bool:
        digest = self.computed.runs[0].digest
        return all(sample.digest == digest for sample in [*self.computed.runs, *self.reused])

    @property
    def answers_equal(self) -> bool:
        return all(cell.answer == self.computed.answer for cell in self.loaded.values())

    @property
    def served(self) -> bool:
        """True where all that could be reused was, from the tier that the column names, and the
        computed column reused nothing."""
        computed = all(sample.reuse.tokens_loaded == 0 for sample in self.computed.runs)
        return computed and all(
            sample.reuse.tokens_loaded == self.expected_tokens
            and self._came_from(way.partition("_")[0], sample)
            for way, cell in self.loaded.items()
            for sample in cell.runs
        )

    def _came_from(self, tier: str, sample: Sample) -> bool:
        """Pages that match but lie behind the last full chunk are not loaded, so they may be left
        on NVMe when the others are in DRAM; none may be in DRAM when the others are on NVMe."""
        pages = sample.reuse.pages_by_tier
        if tier == "dram":
            return pages.get(tier, 0) * self.page_tokens >= sample.reuse.tokens_loaded
        return pages.get(tier, 0) == sum(pages.values())

    @property
    def faults(self) -> list[str]:
        found = {
            "the logits differ": self.logits_equal,
            "the KV bytes differ": self.bytes_equal,
            "the answers differ": self.answers_equal,
            "the warehouse did not deliver all it should have": self.served,
        }
        return [
            f"{self.prompt_tokens:,} tokens: {what}" for what, good in found.items() if not good
        ]


@dataclass(frozen=True)
class Control:
    """The same prompt with one page of the loaded cache set to zero: were the answer the same, the
    other comparisons would prove nothing."""

    prompt_tokens: int
    zeroed_page: int
    whole: Sample
    damaged: Sample

    @property
    def answer_changed(self) -> bool:
        return self.whole.answer != self.damaged.answer

    @property
    def logits_changed(self) -> bool:
        return not self.whole.same_logits(self.damaged)

    @property
    def first_different_token(self) -> int | None:
        """Counted from 1."""
        pairs = zip(self.whole.answer, self.damaged.answer, strict=False)
        different = (place for place, (one, other) in enumerate(pairs, 1) if one != other)
        return next(different, None)


@dataclass(frozen=True)
class Machine:
    """load: the load average of the last minute, read when the demo began, before its own work."""

    cores: int
    load: float

    @property
    def busy(self) -> bool:
        """True where other work leaves less than half of the cores."""
        return self.load > self.cores / 2


@dataclass(frozen=True)
class Outcome:
    rows: tuple[Row, ...]
    control: Control
    model: str
    random_weights: bool
    machine: Machine
    pace: Pace
    """As it was measured before the rows."""
    asked_longest: int
    """Tokens of the longest prompt that was asked for; more than the last row's where the machine
    was too slow for it."""
    page_tokens: int
    page_bytes: int
    pages_stored: int
    total_s: float

    @property
    def shrunk(self) -> bool:
        return self.rows[-1].prompt_tokens < self.asked_longest

    @property
    def reused(self) -> list[Sample]:
        return [sample for row in self.rows for sample in row.reused]

    @property
    def pages_asked(self) -> int:
        """Whole pages of all prompts that were asked with a filled warehouse."""
        return sum(len(row.reused) * (row.prompt_tokens // self.page_tokens) for row in self.rows)

    @property
    def pages_hit(self) -> int:
        return sum(sample.reuse.tokens_matched // self.page_tokens for sample in self.reused)

    @property
    def bytes_loaded(self) -> int:
        return sum(sample.reuse.bytes_loaded for sample in self.reused)

    @property
    def faults(self) -> list[str]:
        """What should be equal and is not, or should differ and does not."""
        faults = [fault for row in self.rows for fault in row.faults]
        if not self.control.logits_changed:
            faults.append("control: a zeroed page changed no logit")
        elif self.random_weights and not self.control.answer_changed:
            # A trained model may well answer the same without one page of the document.
            faults.append("control: a zeroed page did not change the answer")
        return faults

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [_row_json(row) for row in self.rows],
            "control_changed": self.control.answer_changed,
            "control": {
                "prompt_tokens": self.control.prompt_tokens,
                "zeroed_page": self.control.zeroed_page,
                "logits_changed": self.control.logits_changed,
                "first_different_token": self.control.first_different_token,
            },
            "details": [_details_json(row) for row in self.rows],
            "faults": self.faults,
            "hit_rate": self.pages_hit / self.pages_asked,
            "pages_stored": self.pages_stored,
            "bytes_stored": self.pages_stored * self.page_bytes,
            "bytes_loaded": self.bytes_loaded,
            "page_tokens": self.page_tokens,
            "page_bytes": self.page_bytes,
            "model": self.model,
            "random_weights": self.random_weights,
            "shrunk": self.shrunk,
            "cores": self.machine.cores,
            "load_average": self.machine.load,
            "chunk_tokens": self.pace.chunk_tokens,
            "recompute_512_s": self.pace.unit_s,
            "recompute_512_in_one_piece_s": self.pace.piece_s,
            "total_s": self.total_s,
        }


def _row_json(row: Row) -> dict[str, Any]:
    """The better run of each cell."""
    return {
        "prompt_tokens": row.prompt_tokens,
        "recompute_s": row.computed.first_token_s,
        **{f"{way}_s": cell.first_token_s for way, cell in row.loaded.items()},
        "logits_equal": row.logits_equal,
    }


def _details_json(row: Row) -> dict[str, Any]:
    """All runs, in the order in which they were made."""
    cells = {"recompute": row.computed, **row.loaded}
    return {
        "prompt_tokens": row.prompt_tokens,
        "tokens_reused": row.expected_tokens,
        "runs": row.runs,
        "bytes_equal": row.bytes_equal,
        "answers_equal": row.answers_equal,
        "served": row.served,
        **{
            f"{name}_runs_s": [sample.first_token_s for sample in cell.runs]
            for name, cell in cells.items()
        },
        **{
            f"{way}_load_s": min(sample.reuse.load_s for sample in cell.runs)
            for way, cell in row.loaded.items()
        },
    }
