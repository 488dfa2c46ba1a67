"""When a certificate ends: read from its DER, because Python's ssl tells it of peers alone. For
what OpenSSL has accepted already. Stateless; thread-safe."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from typing import Final

_BLOCK: Final = re.compile(
    "-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.ASCII | re.DOTALL
)
_VERSION: Final = 0xA0
_GENERALIZED_TIME: Final = 0x18
_LONG: Final = 0x80


def ends_at(chain: bytes) -> datetime:
    """When the first of the certificates in `chain`, PEM, ends. Raises ValueError for what has
    none, or one that is cut."""
    blocks = _BLOCK.findall(chain.decode("latin-1"))
    try:
        return min(_not_after(ssl.PEM_cert_to_DER_cert(block)) for block in blocks)
    except IndexError as error:
        raise ValueError("a certificate that is cut") from error


def _not_after(certificate: bytes) -> datetime:
    (_, whole), *_ = _parts(certificate)
    (_, signed), *_ = _parts(whole)
    fields = [content for kind, content in _parts(signed) if kind != _VERSION]
    _serial, _algorithm, _issuer, validity = fields[:4]
    kind, text = _parts(validity)[1]
    digits = text.decode("ascii")
    if kind != _GENERALIZED_TIME:  # two digits of the year, from 1950
        digits = ("19" if digits >= "50" else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _parts(data: bytes) -> list[tuple[int, bytes]]:
    parts, place = [], 0
    while place < len(data):
        kind, length = data[place], data[place + 1]
        place += 2
        if length >= _LONG:
            wide = length - _LONG
            length = int.from_bytes(data[place : place + wide])
            place += wide
        parts.append((kind, data[place : place + length]))
        place += length
    return parts
