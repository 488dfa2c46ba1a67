"""Bearer tokens of the TCP service: every call carries one, or is refused. Thread-safe.

Comparison takes the same time whatever the difference. Several lines in the file let old and new
ones overlap while they are rotated.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias

import grpc

from kvwarehouse import trusted_file
from kvwarehouse.daemon.refusals import Refusals
from kvwarehouse.errors import UsageError
from kvwarehouse.wire import DETAIL_KEY, error_to_detail, status_of

MIN_TOKEN_CHARS: Final = 16
MAX_TOKENS: Final = 64

_HEADER: Final = "authorization"
_SCHEME: Final = "bearer "

# Of metrics.REFUSAL_REASONS.
_NO_TOKEN: Final = "no_token"
_BAD_TOKEN: Final = "bad_token"


def read_tokens(path: str) -> list[str]:
    """The tokens in the file at `path`, one a line; empty lines and those with # are skipped.
    Raises UsageError that never shows a token."""
    try:
        text = trusted_file.read(path, "--token-file", secret=True).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(path, "is not text") from error
    lines = [line.strip() for line in text.splitlines()]
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not 1 <= len(tokens) <= MAX_TOKENS:
        raise _bad(path, f"has {len(tokens)} tokens; it needs 1 to {MAX_TOKENS}, one a line")
    for number, token in enumerate(tokens, start=1):
        if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
            raise _bad(
                path,
                f"has a token ({number}) that is shorter than {MIN_TOKEN_CHARS} characters or not "
                "plain ASCII; make one with: openssl rand -hex 32",
            )
    return tokens


def _bad(path: str, problem: str) -> UsageError:
    return UsageError(f"--token-file {path!r} {problem}", code="bad_config")


Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class TokenCheck(grpc.ServerInterceptor):
    """Refuses every call without one of `tokens`, health and reflection included."""

    def __init__(self, tokens: list[str], refusals: Refusals) -> None:
        self.replace(tokens)
        # Of the widest kind: it answers before it reads a request, whatever the method's own kind.
        self._refusals: dict[str, Handler] = {
            reason: grpc.stream_stream_rpc_method_handler(partial(_refuse, refusals, reason))
            for reason in (_NO_TOKEN, _BAD_TOKEN)
        }

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
        values = [value for key, value in metadata or () if key == _HEADER]
        if not values:
            return _NO_TOKEN
        if len(values) != 1 or not isinstance(values[0], str):
            return _BAD_TOKEN
        if values[0][: len(_SCHEME)].lower() != _SCHEME:
            return _BAD_TOKEN
        given = _digest(values[0][len(_SCHEME) :].strip())
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
