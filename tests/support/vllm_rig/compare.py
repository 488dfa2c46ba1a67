"""Whether two answers to one prompt are the same.

Tokens must be equal. Random weights nearly tie now and then, and other batches add in another
order: where tokens part, each must have been as likely, within the tolerance, to the one who did
not take it. Up to there all log-probabilities must agree within it too; afterwards contexts differ.
"""

from __future__ import annotations

from vllm_rig.messages import Answer

FLOAT32_TOLERANCE = 0.0005
BFLOAT16_TOLERANCE = 0.1


def difference(one: Answer, other: Answer, tolerance: float = FLOAT32_TOLERANCE) -> str:
    """What differs; empty when nothing does."""
    if (len(one.tokens), one.finish) != (len(other.tokens), other.finish):
        return (
            f"{len(one.tokens)} tokens and {one.finish!r}, "
            f"{len(other.tokens)} tokens and {other.finish!r}"
        )
    for step, (mine, theirs) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        apart = _apart(one.candidates[step], other.candidates[step], {mine, theirs})
        if apart > tolerance:
            return (
                f"token {step}: {mine} and {theirs}, log-probabilities {apart:.4f} apart "
                f"(tolerance {tolerance}): {one.candidates[step]} and {other.candidates[step]}"
            )
        if mine != theirs:
            return ""
    return ""


def _apart(one: dict[int, float], other: dict[int, float], needed: set[int]) -> float:
    """The largest difference over what both know; infinite when one does not know `needed`."""
    if not needed <= one.keys() & other.keys():
        return float("inf")
    return max(abs(one[token] - other[token]) for token in one.keys() & other.keys())


def assert_same(one: Answer, other: Answer, tolerance: float = FLOAT32_TOLERANCE) -> None:
    found = difference(one, other, tolerance)
    assert not found, found
