"""Docstrings, which are plain text with code between backticks, as the markup that Sphinx reads."""

from __future__ import annotations

import re
from typing import Any

_CODE = re.compile(r"(`+)([^`]+)\1")
_MARKUP = re.compile(r"([*|\\]|_(?!\w))")


def as_rst(app: Any, what: str, name: str, thing: object, options: Any, lines: list[str]) -> None:
    """Changes `lines` in place, as Sphinx's event autodoc-process-docstring asks."""
    found: list[str] = []
    for line in lines:
        code = line.startswith("    ")
        if code and found and not found[-1].startswith("    ") and not _in_code(found):
            found += ["", "::", ""]
        found.append(line if code else _escaped(line))
    lines[:] = found


def _in_code(lines: list[str]) -> bool:
    """Whether the last line that is not empty belongs to a piece of code."""
    said = [line for line in lines if line]
    return bool(said) and said[-1].startswith("    ")


def _escaped(line: str) -> str:
    """Code keeps what it has; elsewhere what RST would take for markup does not count as such."""
    parts = _CODE.split(line)
    texts = [_MARKUP.sub(r"\\\1", text) for text in parts[::3]]
    codes = [f"``{code}``" for code in parts[2::3]]
    return "".join(a + b for a, b in zip(texts, [*codes, ""], strict=True))
