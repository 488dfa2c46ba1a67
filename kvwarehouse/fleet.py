"""The secret that hosts of a fleet share, so that equal pages have equal keys on all of them.

    secret    = SHAKE-256("kvwarehouse/fleet-secret/1" + the file's bytes), 192 bytes
    fleet id  = BLAKE2b-128("kvwarehouse/fleet-id/1" + secret)

The id names the fleet where the secret must not be seen: in logs, in status, in a shared store's
names. Neither leads back to the file. Stateless; thread-safe.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

from kvwarehouse import trusted_file
from kvwarehouse.errors import UsageError

SECRET_BYTES: Final = 192  # native/base/types.h; a test compares them
FLEET_ID_BYTES: Final = 16
MIN_FILE_BYTES: Final = 32

_FLAG: Final = "--fleet-secret"
_SECRET_DOMAIN: Final = b"kvwarehouse/fleet-secret/1"
_ID_DOMAIN: Final = b"kvwarehouse/fleet-id/1"


@dataclass(frozen=True)
class FleetSecret:
    """`secret`: SECRET_BYTES, which key the chains of all hosts of the fleet."""

    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, path: str) -> FleetSecret:
        """Of the file at `path`: all of its bytes count, a newline at its end too. Raises
        UsageError, which never shows any of them, for a file that is short or that others reach."""
        data = trusted_file.read(path, _FLAG, secret=True)
        if len(data) < MIN_FILE_BYTES:
            raise UsageError(
                f"{_FLAG} {path!r} has {len(data)} bytes, so it could be guessed; it needs at "
                f"least {MIN_FILE_BYTES}: make it once, with openssl rand -hex 32, and copy the "
                "same file to all hosts of the fleet",
                code="bad_config",
            )
        return cls.derive(data)

    @classmethod
    def derive(cls, data: bytes) -> FleetSecret:
        """Of the bytes of a file."""
        return cls(hashlib.shake_256(_SECRET_DOMAIN + data).digest(SECRET_BYTES))

    @property
    def fleet_id(self) -> bytes:
        """FLEET_ID_BYTES; no secret."""
        return hashlib.blake2b(_ID_DOMAIN + self.secret, digest_size=FLEET_ID_BYTES).digest()
