"""Files in which the kernel says what there is, and what it allows. Stateless; thread-safe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
"""What is below another one, tests have made up."""

_FILE_BYTES: Final = 1 << 20


def read(path: Path) -> str:
    """Raises OSError."""
    with open(path, "rb") as file:
        return file.read(_FILE_BYTES).decode("utf-8", "backslashreplace")


def text(path: Path) -> str:
    """ "" where there is no such file, or it is not ours to read."""
    try:
        return read(path)
    except OSError:
        return ""


def word(pattern: str, text: str) -> str:
    """The group of a pattern in a text; "" where it is not in it."""
    match = re.search(pattern, text)
    return match[1] if match else ""


def number(pattern: str, text: str) -> int:
    """As `word`; 0 where it is not in it."""
    return int(word(pattern, text) or "0")
