"""What libraries say, made fit for a log: requests as they were sent have signatures and tokens in
their queries. Stateless; thread-safe.
"""

from __future__ import annotations

import re
from typing import Final

_CHARACTERS: Final = 400
_QUERY: Final = re.compile(r"(\w+://[^\s?]*)\?\S*")
_PASSWORD: Final = re.compile(r"(\w+://)[^\s/@]*@")


def without_secrets(text: str) -> str:
    """Without queries of URLs, and without users and passwords in them."""
    return _PASSWORD.sub(r"\1", _QUERY.sub(r"\1", text))


def first_line(error: BaseException) -> str:
    """Of what a library says: behind it are its own structures, and requests as they were sent."""
    lines = str(error).splitlines()
    words = without_secrets(lines[0] if lines else type(error).__name__).split()
    return " ".join(words)[:_CHARACTERS]
