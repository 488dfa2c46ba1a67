"""What no bundle may have in it, and the one place that takes it out: every text of a bundle goes
through a Redactor, whatever it is and wherever it came from.

It takes out the secrets that it was told of, in each way they may be written, and what looks like a
secret: values whose name says so, credentials in URLs and headers, private keys, well-known forms
of tokens, 32 random bytes as hex or base64, and what has the form of token ids or of bytes. Salts
are among the names. It errs towards taking out: a bundle is read by strangers.

A Redactor is not thread-safe while it learns.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias
from urllib.parse import quote, quote_plus

REDACTED: Final = "(redacted)"

SHORTEST_SECRET: Final = 6
"""Characters. A shorter value is not looked for: it would be found in the middle of words."""

_WORDS: Final = (
    r"(?:token|secret|passw(?:or)?d|passphrase|[_-]pwd|api[_-]?key|apikey|access[_-]?key(?:[_-]?id)?"
    r"|account[_-]?key|secret[_-]?key"
    r"|private[_-]?key|auth[_-]?key|credentials?|salt|cookie|authorization|signature|prompt"
    r"|token[_-]?ids|input[_-]?ids)"
)
_SECRET_VARIABLE: Final = re.compile(rf"(?i)[A-Z0-9_.-]*({_WORDS}|(?<![A-Z])KEY|AUTH)S?")

# Short numbers are counts: `no_token: 3`.
_VALUE: Final = r"(?!\d{1,7}(?![\w.-]))"

Rule: TypeAlias = "tuple[re.Pattern[str], str]"
"""A pattern, and what is put in its place."""


def _rules(*rules: tuple[str, str]) -> tuple[Rule, ...]:
    return tuple((re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in rules)


# By what comes before it. Looked for in lines that have one of the hints: most have none.
_NAMED: Final = _rules(
    # user:password@ and token@ of an URL, and what a query calls a secret
    (r"\b([a-z][a-z0-9+.-]{0,20}://)[^\s/@\"'<>]{1,500}@", rf"\1{REDACTED}@"),
    (rf"([?&;][\w.-]{{0,40}}(?:{_WORDS}|key|sig|auth)=)[^\s&;\"'<>#]+", rf"\1{REDACTED}"),
    (r"\b(bearer|basic)\s+[a-z0-9._~+/=-]{6,}", rf"\1 {REDACTED}"),
    # "name": "value", and lists of any values
    (rf"({_WORDS}\"\s*:\s*)\"(?:[^\"\\]|\\.)*(?:\"|$)", rf'\1"{REDACTED}"'),
    (rf"({_WORDS}\"?\s*[:=]\s*)\[[^\]]*(?:\]|$)", rf"\1[{REDACTED}]"),
    # name=value, name: value, --name value
    (rf"({_WORDS}[\"']?\s*[=:]\s*){_VALUE}\"(?:[^\"\\]|\\.)*\"", rf'\1"{REDACTED}"'),
    (rf"({_WORDS}[\"']?\s*[=:]\s*){_VALUE}'[^']*'", rf"\1'{REDACTED}'"),
    (rf"({_WORDS}[\"']?\s*[=:]\s*){_VALUE}(?![\[{{\"'(])[^\s,;\"'}}\]]+", rf"\1{REDACTED}"),
    (rf"(--[\w-]{{0,40}}{_WORDS}\s+)(?!-)[^\s(]+", rf"\1{REDACTED}"),
)
_HINTS: Final = (
    "://", "auth", "basic", "bearer", "cookie", "credential", "ids", "key", "pass", "prompt", "pwd",
    "salt", "secret", "sig", "token",
)  # fmt: skip

_FORMED: Final = _rules(
    (
        r"(?s)-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?"
        r"(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)",
        REDACTED,
    ),
    (r"\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abps]-|AKIA|ASIA)[\w-]{8,}", REDACTED),
    (r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*", REDACTED),
    (r"(?<![0-9a-f])(?:[0-9a-f]{2}){32,}(?![0-9a-f])", REDACTED),
    (r"(?<![\w+/-])[a-z0-9+/_-]{43}=(?!=)", REDACTED),
    (r"\bb(?:'(?:[^'\\]|\\.)*(?:'|$)|\"(?:[^\"\\]|\\.)*(?:\"|$))", f"b{REDACTED}"),
    (r"(?<![\w.])\d+(?:,[ ]?\d+){7,}(?![\w.])", REDACTED),
)


class Redactor:
    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._forms: set[str] = set()
        for each in secrets:
            self.learn(each)

    def learn(self, secret: str) -> None:
        """A secret that must not be in any text, alone or within another word."""
        secret = secret.strip()
        if len(secret) < SHORTEST_SECRET:
            return
        plain = secret.encode("utf-8", "surrogateescape")
        self._forms |= {
            secret,
            json.dumps(secret)[1:-1],
            json.dumps(secret, ensure_ascii=False)[1:-1],
            repr(secret)[1:-1],
            quote(plain, safe=""),
            quote_plus(plain),
            plain.hex(),
            plain.hex().upper(),
            base64.b64encode(plain).decode("ascii").rstrip("="),
            base64.urlsafe_b64encode(plain).decode("ascii").rstrip("="),
        }

    def learn_variables(self, environment: Mapping[str, str]) -> None:
        """The values of environment variables whose names say that they are secret."""
        for name, value in environment.items():
            if is_secret_name(name):
                self.learn(value)

    def text(self, text: str) -> str:
        """`text` without them."""
        for form in sorted(self._forms, key=len, reverse=True):  # one may be part of another
            text = text.replace(form, REDACTED)
        text = "\n".join(map(_without_named, text.split("\n")))
        for pattern, instead in _FORMED:
            text = pattern.sub(instead, text)
        return text


def _without_named(line: str) -> str:
    lowered = line.lower()
    if any(hint in lowered for hint in _HINTS):
        for pattern, instead in _NAMED:
            line = pattern.sub(instead, line)
    return line


def is_secret_name(name: str) -> bool:
    """Whether what a variable or a setting of this name has is for nobody else to see."""
    return _SECRET_VARIABLE.fullmatch(name) is not None
