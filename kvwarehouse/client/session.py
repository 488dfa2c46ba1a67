"""How a client on the daemon's host works with shared memory. Immutable; thread-safe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvwarehouse.client.endpoint import Address, Endpoint, checked_timeout
from kvwarehouse.errors import TransportError, UsageError

if TYPE_CHECKING:
    from kvwarehouse.client.shared_memory import SharedMemory

Verify: TypeAlias = Literal["always", "boundary"]


@dataclass(frozen=True)
class Session:
    """`kvwarehouse.connect` explains the fields."""

    verify: Verify = "always"
    patience_s: float | None = None
    read_only: bool = False


def checked_session(
    where: Address, verify: Verify, patience_s: float | None, read_only: bool
) -> Session | None:
    """None for another host, whose memory is not shared. Raises UsageError."""
    if verify not in ("always", "boundary"):
        raise UsageError(f'verify = {verify!r}; use "always" or "boundary"', code="bad_verify")
    if patience_s is not None:
        patience_s = checked_timeout(patience_s, "patience_s")
    if where.local:
        return Session(verify, patience_s, bool(read_only))
    if patience_s is not None or read_only:
        raise UsageError(
            f"patience_s and read_only are for shared memory, and {where} shares none; leave"
            " them out, or connect to the daemon of this host by its unix:// address",
            code="unsupported",
        )
    return None


def shared_memory(endpoint: Endpoint, session: Session) -> SharedMemory:
    """Blocks for a round trip, at most the endpoint's timeout."""
    # Not at the top: remote clients, and tests of them, need no native core.
    from kvwarehouse.client.shared_memory import SharedMemory

    try:
        return SharedMemory(endpoint.address, session, endpoint.timeout_s)
    except TransportError as error:
        if error.code != "no_daemon":
            raise
        raise TransportError(
            endpoint.address.unreachable(error.message),
            code="no_daemon",
            context={"address": endpoint.address},
        ) from error
