"""What libraries say, made fit for a log: requests as they were sent have signatures and tokens in
their queries, and what a store answers may repeat the key's id and all that was signed, a session's
token too. Stateless; thread-safe.
"""

from __future__ import annotations

import re
from typing import Final

_CHARACTERS: Final = 400
_QUERY: Final = re.compile(r"(\w+://[^\s?]*)\?\S*")
_PASSWORD: Final = re.compile(r"(\w+://)[^\s/@]*@")

# Of the body of a refusal (S3, and all that speak it; Azure): the rest of it is not for a log.
_BODY: Final = re.compile(r"<(?:\?xml|Error)\b")
_BODY_PARTS: Final = (
    re.compile(r"<Code>([\w.]{1,60})</Code>"),
    re.compile(r"<Message>([^<\n]{1,200})"),
)


def without_secrets(text: str) -> str:
    """Without queries of URLs, and without users and passwords in them."""
    return _PASSWORD.sub(r"\1", _QUERY.sub(r"\1", text))


def first_line(error: BaseException) -> str:
    """Of what a library says: behind it are its own structures, and requests as they were sent. Of
    a body that a store answered with, its code and its message."""
    text = str(error)
    lines = _BODY.split(text, maxsplit=1)[0].splitlines()
    found = [part.search(text) for part in _BODY_PARTS]
    said = ": ".join(match[1] for match in found if match)
    line = f"{lines[0] if lines else type(error).__name__} {said}"
    return " ".join(without_secrets(line).split())[:_CHARACTERS]
