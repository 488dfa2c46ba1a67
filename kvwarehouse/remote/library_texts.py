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
_STATUS: Final = re.compile(
    r" - Server returned non-2xx status code: (\d{3} [A-Z][A-Za-z' -]{1,40})"
)
_ANSWER: Final = (
    ("", _STATUS),
    ("", re.compile(r"<Code>([\w.]{1,60})</Code>")),
    ("", re.compile(r"<Message>([^<\n]{1,200})")),
)

# Why nothing was answered at all: only in the library's own structures.
_CAUSE: Final = (
    ("", re.compile(r'message: "([A-Z][A-Za-z ]{1,80})"')),  # the system's
    ("", re.compile(r'error: "(failed to lookup [\w ,:.-]{1,120})"')),
    ("its certificate is not believed: ", re.compile(r"InvalidCertificate\(\s*(\w{1,40})")),
)


def without_secrets(text: str) -> str:
    """Without queries of URLs, and without users and passwords in them."""
    return _PASSWORD.sub(r"\1", _QUERY.sub(r"\1", text))


def first_line(error: BaseException) -> str:
    """Of what a library says: behind it are its own structures, and requests as they were sent.
    What a store has answered, its status, code and message, or why it has not, comes first:
    names are long."""
    text = str(error)
    lines = _BODY.split(text, maxsplit=1)[0].splitlines()
    said = lines[0] if lines else type(error).__name__
    parts = _CAUSE if said.endswith("error sending request") else _ANSWER
    found = [f"{what}{match[1]}" for what, part in parts if (match := part.search(text))]
    line = f"{': '.join(found)} ({_STATUS.split(said)[0]})" if found else said
    return " ".join(without_secrets(line).split())[:_CHARACTERS]
