"""What the TCP service of gRPC knows its callers by, and they it: tokens, a certificate and its
key, from files that are read at the start and whenever somebody asks for it.

One thread reads; gRPC's threads use what was read last.
"""

from __future__ import annotations

import contextlib
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeAlias

import grpc

from kvwarehouse import trusted_file
from kvwarehouse.config import Config
from kvwarehouse.daemon import certificate
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.refusals import Refusals
from kvwarehouse.daemon.tokens import TokenCheck, read_tokens
from kvwarehouse.errors import UsageError

ENDS_SOON_DAYS: Final = 14
"""Before a certificate ends: renewals are due by then, whoever issues it."""

_Pair: TypeAlias = tuple[bytes, bytes]  # key, chain


class Credentials:
    """`tokens`: to put before all calls. `tls`: for the port, None without a certificate."""

    def __init__(self, config: Config, log: Log, refusals: Refusals) -> None:
        """Raises UsageError for files that cannot be used."""
        self._config, self._log = config, log
        tokens, pair = self._read()
        self.tokens = TokenCheck(tokens, refusals)
        self.tls: grpc.ServerCredentials | None = None
        self._fresh: grpc.ServerCertificateConfiguration | None = None  # for the next handshake
        if pair is not None:
            self.tls = grpc.dynamic_ssl_server_credentials(
                _configuration(pair),
                self._fetch,  # type: ignore[arg-type, unused-ignore]  # None is for no change
            )
        self._say_end(pair)

    def reload(self) -> None:
        """Reads the files anew, for the calls and connections to come. Where one cannot be used
        all stays as it was, and the log says so. Does not raise."""
        try:
            tokens, pair = self._read()
        except UsageError as error:
            self._log.event(Event.RELOAD_FAILED, text=f"{error.message}; the old ones stay in use")
            return
        self.tokens.replace(tokens)
        if pair is not None:
            self._fresh = _configuration(pair)
        self._log.event(Event.RELOADED, tokens=len(tokens), certificate=self._config.tls_cert)
        self._say_end(pair)

    def _read(self) -> tuple[list[str], _Pair | None]:
        config = self._config
        tokens = read_tokens(config.token_file)
        return tokens, _read_pair(config.tls_cert, config.tls_key) if config.tls_cert else None

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked by gRPC at each handshake, one at a time."""
        fresh, self._fresh = self._fresh, None
        return fresh

    def _say_end(self, pair: _Pair | None) -> None:
        if pair is None:
            return
        with contextlib.suppress(ValueError):  # of a kind that OpenSSL knows and we do not
            ends = certificate.ends_at(pair[1])
            days = (ends - datetime.now(UTC)).days
            if days < ENDS_SOON_DAYS:
                self._log.event(
                    Event.CERTIFICATE_ENDS,
                    path=self._config.tls_cert,
                    at=ends.isoformat(),
                    days=days,
                    text="clients refuse it from then on; renew it, and send SIGHUP",
                )


def _configuration(pair: _Pair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([pair])


def _read_pair(cert_path: str, key_path: str) -> _Pair:
    """A certificate and key that belong together: gRPC itself would only fail at the first
    handshake."""
    key = trusted_file.read(key_path, "--tls-key", secret=True)
    try:
        chain = Path(cert_path).read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            cert_path, key_path, password=_no_password
        )
        # What was judged went by its path, and somebody may be writing a new pair there.
        if (Path(key_path).read_bytes(), Path(cert_path).read_bytes()) != (key, chain):
            raise ValueError("they change while they are read")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise UsageError(
            f"--tls-cert {cert_path!r} and --tls-key {key_path!r} cannot be used: {error}; they "
            "must be PEM files, unencrypted, and belong together",
            code="bad_config",
        ) from error
    return key, chain


def _no_password() -> str:
    raise ValueError("the key is encrypted")
