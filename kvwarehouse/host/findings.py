"""What the doctor says of one thing it looked at. Immutable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """It works, but not as well or not as surely as it could."""
    FAIL = "fail"
    """The warehouse cannot serve until it is mended."""
    SKIP = "skip"
    """Could not be looked at, and why; another finding names the cause."""


@dataclass(frozen=True)
class Finding:
    check: str
    """What was looked at: a short name that stays, for scripts."""
    verdict: Verdict
    what: str
    """What was found, in words."""
    fix: str = ""
    """What to do about it; given with every warning and every failure."""


def ok(check: str, what: str) -> Finding:
    return Finding(check, Verdict.OK, what)


def warn(check: str, what: str, fix: str) -> Finding:
    return Finding(check, Verdict.WARN, what, fix)


def fail(check: str, what: str, fix: str) -> Finding:
    return Finding(check, Verdict.FAIL, what, fix)


def skip(check: str, why: str) -> Finding:
    return Finding(check, Verdict.SKIP, why)


def healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.verdict is not Verdict.FAIL for finding in findings)
