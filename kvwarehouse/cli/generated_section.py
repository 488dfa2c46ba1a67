"""Parts of documents that programs write: what stands between two marks. Pure."""

from __future__ import annotations


def replace_section(document: str, begin: str, end: str, text: str) -> str:
    """The document with what stands between its marks, each on a line of its own, replaced.
    ValueError when it has no marks."""
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the document needs a line {begin!r} and, below, a line {end!r}")
    return before + begin + text + end + after
