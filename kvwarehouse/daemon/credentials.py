"""What the TCP service of gRPC knows its callers by, and they it: tokens, a certificate and its
key, from files that are read at the start and whenever somebody asks for it.

One thread reads; gRPC's threads use what was read last. Every call carries one of the bearer
tokens, or is refused; comparison takes the same time whatever the difference, and several lines in
the file let old and new ones overlap while they are rotated. When a certificate ends is read from
its DER, because Python's ssl tells it of peers alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import ssl
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import grpc

from kvwarehouse import trusted_file
from kvwarehouse.config import Config
from kvwarehouse.daemon.admission import Refusals
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.errors import UsageError
from kvwarehouse.wire import DETAIL_KEY, error_to_detail, status_of

_PEM_BLOCK: Final = re.compile(
    "-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.ASCII | re.DOTALL
)
_VERSION_TAG: Final = 0xA0
_GENERALIZED_TIME: Final = 0x18
_LONG_LENGTH: Final = 0x80

MIN_TOKEN_CHARS: Final = 16
MAX_TOKENS: Final = 64

_TOKEN_HEADER: Final = "authorization"
_TOKEN_SCHEME: Final = "bearer "

# Reasons of the metric refused_calls_total.
_NO_TOKEN: Final = "no_token"
_BAD_TOKEN: Final = "bad_token"

ENDS_SOON_DAYS: Final = 14
"""Before a certificate ends: renewals are due by then, whoever issues it."""


def certificate_ends_at(chain: bytes) -> datetime:
    """When the first of the certificates in `chain`, PEM, ends. Raises ValueError for what has
    none, or one that is cut."""
    blocks = _PEM_BLOCK.findall(chain.decode("latin-1"))
    try:
        return min(_not_after(ssl.PEM_cert_to_DER_cert(block)) for block in blocks)
    except IndexError as error:
        raise ValueError("a certificate that is cut") from error


def _not_after(certificate: bytes) -> datetime:
    (_, whole), *_ = _parts(certificate)
    (_, signed), *_ = _parts(whole)
    fields = [content for kind, content in _parts(signed) if kind != _VERSION_TAG]
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
        if length >= _LONG_LENGTH:
            wide = length - _LONG_LENGTH
            length = int.from_bytes(data[place : place + wide])
            place += wide
        parts.append((kind, data[place : place + length]))
        place += length
    return parts


def read_tokens(path: str) -> list[str]:
    """The tokens in the file at `path`, one a line; empty lines and those with # are skipped.
    Raises UsageError that never shows a token."""
    try:
        text = trusted_file.read(path, "--token-file", secret=True).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad_token_file(path, "is not text") from error
    lines = [line.strip() for line in text.splitlines()]
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not 1 <= len(tokens) <= MAX_TOKENS:
        raise _bad_token_file(
            path, f"has {len(tokens)} tokens; it needs 1 to {MAX_TOKENS}, one a line"
        )
    for number, token in enumerate(tokens, start=1):
        if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
            raise _bad_token_file(
                path,
                f"has a token ({number}) that is shorter than {MIN_TOKEN_CHARS} characters or not "
                "plain ASCII; make one with: openssl rand -hex 32",
            )
    return tokens


def _bad_token_file(path: str, problem: str) -> UsageError:
    return UsageError(f"--token-file {path!r} {problem}", code="bad_config")


Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _AtOnce(ThreadPoolExecutor):
    """Runs what it is given on the thread that gives it, to its end. What refuses a call waits for
    nobody; on the server's own threads it would take the places of calls that have a token, and
    those that wait for one."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  as of another thread
            done.set_exception(error)
        return done


class TokenCheck(grpc.ServerInterceptor):
    """Refuses every call without one of `tokens`, health and reflection included."""

    def __init__(self, tokens: list[str], refusals: Refusals) -> None:
        self.replace(tokens)
        # Of the widest kind: it answers before it reads a request, whatever the method's own kind.
        self._refusals: dict[str, Handler] = {}
        for reason in (_NO_TOKEN, _BAD_TOKEN):
            behavior = partial(_refuse, refusals, reason)
            behavior.experimental_thread_pool = _AtOnce(1)  # type: ignore[attr-defined]  # gRPC's
            self._refusals[reason] = grpc.stream_stream_rpc_method_handler(behavior)

    def replace(self, tokens: list[str]) -> None:
        """For the calls to come; those under way go on."""
        self._digests = [_digest(token) for token in tokens]

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        reason = self._reason(handler_call_details.invocation_metadata)
        return self._refusals[reason] if reason else continuation(handler_call_details)

    def _reason(self, metadata: Any) -> str:
        """Why a call is refused, or ""."""
        values = [value for key, value in metadata or () if key == _TOKEN_HEADER]
        if not values:
            return _NO_TOKEN
        if len(values) != 1 or not isinstance(values[0], str):
            return _BAD_TOKEN
        if values[0][: len(_TOKEN_SCHEME)].lower() != _TOKEN_SCHEME:
            return _BAD_TOKEN
        given = _digest(values[0][len(_TOKEN_SCHEME) :].strip())
        # All of them, so that the time does not tell which one came close.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return "" if any(matches) else _BAD_TOKEN


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _refuse(
    refusals: Refusals, reason: str, _requests: Any, context: grpc.ServicerContext
) -> NoReturn:
    refusals.count(reason, context.peer())
    error = UsageError(
        "this call needs a token of this daemon: connect with token=... (commands: --token-file or "
        "KVW_TOKEN), or send the metadata 'authorization: Bearer TOKEN'",
        code="unauthenticated",
    )
    context.set_trailing_metadata(((DETAIL_KEY, error_to_detail(error)),))
    context.abort(status_of(error), error.message)


_Pair: TypeAlias = tuple[bytes, bytes]  # key, chain


class TcpCredentials:
    """`tokens`: to put before all calls. `pair`: key and certificate as they were read last, None
    without."""

    def __init__(self, config: Config, log: Log, refusals: Refusals) -> None:
        """Raises UsageError for files that cannot be used."""
        self._config, self._log = config, log
        tokens, self.pair = self._read()
        self.tokens = TokenCheck(tokens, refusals)
        self._say_end(self.pair)

    def tls(self) -> grpc.ServerCredentials | None:
        """For one more port, None without a certificate. Each port has its own: gRPC takes the
        first configuration once, and a new one for the port alone that asks."""
        if self.pair is None:
            return None
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self.pair),
            _PortCertificate(self, self.pair),  # type: ignore[arg-type, unused-ignore]  # None
        )

    def reload(self) -> None:
        """Reads the files anew, for the calls and connections to come. Where one cannot be used
        all stays as it was, and the log says so. Does not raise."""
        try:
            tokens, pair = self._read()
        except UsageError as error:
            self._log.event(Event.RELOAD_FAILED, text=f"{error.message}; the old ones stay in use")
            return
        self.tokens.replace(tokens)
        self.pair = pair
        self._log.event(Event.RELOADED, tokens=len(tokens), certificate=self._config.tls_cert)
        self._say_end(pair)

    def _read(self) -> tuple[list[str], _Pair | None]:
        config = self._config
        tokens = read_tokens(config.token_file)
        return tokens, _read_pair(config.tls_cert, config.tls_key) if config.tls_cert else None

    def _say_end(self, pair: _Pair | None) -> None:
        if pair is None:
            return
        with contextlib.suppress(ValueError):  # of a kind that OpenSSL knows and we do not
            ends = certificate_ends_at(pair[1])
            days = (ends - datetime.now(UTC)).days
            if days < ENDS_SOON_DAYS:
                self._log.event(
                    Event.CERTIFICATE_ENDS,
                    path=self._config.tls_cert,
                    at=ends.isoformat(),
                    days=days,
                    text="clients refuse it from then on; renew it, and send SIGHUP",
                )


class _PortCertificate:
    """What one port shows. gRPC asks at each handshake of the port, one at a time, and keeps what
    it has where the answer is None."""

    def __init__(self, credentials: TcpCredentials, shown: _Pair) -> None:
        self._credentials, self._shown = credentials, shown

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        pair = self._credentials.pair
        if pair is None or pair is self._shown:
            return None
        self._shown = pair
        return _configuration(pair)


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
