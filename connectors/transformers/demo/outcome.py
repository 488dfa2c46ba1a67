"""What the demo found, and whether it is what must be. Immutable; thread-safe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvwarehouse_connectors.transformers.demo.pace import Pace
from kvwarehouse_connectors.transformers.demo.sample import Sample


@dataclass(frozen=True)
class Row:
    """One prompt, answered four ways. expected_tokens: what the warehouse has of it on the grid."""

    prompt_tokens: int
    expected_tokens: int
    computed: Sample
    dram: Sample
    dram_after_kill: Sample
    nvme: Sample

    @property
    def loaded(self) -> dict[str, Sample]:
        return {"dram": self.dram, "dram_after_kill": self.dram_after_kill, "nvme": self.nvme}

    @property
    def logits_equal(self) -> bool:
        return all(sample.same_logits(self.computed) for sample in self.loaded.values())

    @property
    def bytes_equal(self) -> bool:
        return all(sample.digest == self.computed.digest for sample in self.loaded.values())

    @property
    def answers_equal(self) -> bool:
        return all(sample.answer == self.computed.answer for sample in self.loaded.values())

    @property
    def served(self) -> bool:
        """Whether all that could be reused was, from the tier that the column names."""
        return all(
            sample.reuse.tokens_loaded == self.expected_tokens
            and sample.reuse.pages_by_tier.get(name.partition("_")[0], 0)
            == sum(sample.reuse.pages_by_tier.values())
            for name, sample in self.loaded.items()
        )

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
class Outcome:
    rows: tuple[Row, ...]
    control: Control
    model: str
    random_weights: bool
    pace: Pace
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
        return [sample for row in self.rows for sample in row.loaded.values()]

    @property
    def pages_asked(self) -> int:
        """Whole pages of all prompts that were asked with a filled warehouse."""
        return sum(3 * (row.prompt_tokens // self.page_tokens) for row in self.rows)

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
            "rows": [
                {
                    "prompt_tokens": row.prompt_tokens,
                    "recompute_s": row.computed.first_token_s,
                    **{f"{name}_s": sample.first_token_s for name, sample in row.loaded.items()},
                    "logits_equal": row.logits_equal,
                }
                for row in self.rows
            ],
            "control_changed": self.control.answer_changed,
            "control": {
                "prompt_tokens": self.control.prompt_tokens,
                "zeroed_page": self.control.zeroed_page,
                "logits_changed": self.control.logits_changed,
                "first_different_token": self.control.first_different_token,
            },
            "details": [
                {
                    "prompt_tokens": row.prompt_tokens,
                    "tokens_reused": row.expected_tokens,
                    "bytes_equal": row.bytes_equal,
                    "answers_equal": row.answers_equal,
                    "served": row.served,
                    **{
                        f"{name}_load_s": sample.reuse.load_s for name, sample in row.loaded.items()
                    },
                }
                for row in self.rows
            ],
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
            "chunk_tokens": self.pace.chunk_tokens,
            "recompute_512_s": self.pace.unit_s,
            "recompute_512_in_one_piece_s": self.pace.piece_s,
            "total_s": self.total_s,
        }
