"""The seam between the surface of the blocking client and how pages move: shared memory, or chunks
over gRPC. kvwarehouse/aio/transport.py is its twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvwarehouse.client.requests import (
    LoadRequest,
    LookupRequest,
    ReleaseRequest,
    StoreRequest,
)
from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.types import Loaded, Match, Namespace, StoreResult

if TYPE_CHECKING:
    from kvwarehouse.client.client import Client
    from kvwarehouse.client.namespace import OpenNamespace
    from kvwarehouse.client.shared_memory import SharedMemory


class Transport(Protocol):
    """What every way to a daemon can do. Thread-safe. Requests were checked when they were made."""

    patient: bool
    """Calls that read may talk to a new daemon."""

    @property
    def shared_memory(self) -> SharedMemory | None:
        """This transport where it is shared memory, which offers more; None where it is not."""
        ...

    def has_namespace(self, space: Namespace) -> bool:
        """Returns True when the daemon is known to have `space`. Finds a new daemon first if it
        must."""
        ...

    def lookup(self, request: LookupRequest) -> Match: ...

    def load(self, request: LoadRequest) -> Loaded: ...

    def store(self, request: StoreRequest) -> StoreResult: ...

    def release(self, request: ReleaseRequest) -> int: ...

    def close(self) -> None: ...


def shared_memory_of(owner: Client | OpenNamespace) -> SharedMemory:
    """The memory that a client on the daemon's host, or a namespace of such a client, works with.

    Raises UsageError (code "unsupported") for other clients."""
    memory = owner._transport.shared_memory
    if memory is None:
        raise no_pins(owner._channel.address)
    return memory


def no_tiers(address: object) -> UsageError:
    return unshared(address, "tiers are read from shared memory", "look the prompt up instead")


def no_pins(address: object) -> UsageError:
    return unshared(address, "pins hold pages of shared memory", "load them instead")


def no_control(address: object) -> UsageError:
    return unshared(address, "the control page is shared memory", "ask for the status")


def no_refresh(address: object) -> UsageError:
    return unshared(address, "refresh maps new shared memory", "go on, calls reconnect")


def unshared(address: object, what: str, instead: str) -> UsageError:
    """The error (code "unsupported") for what a client without shared memory cannot do."""
    return UsageError(
        f"{what}, and {address} shares none; {instead}, or connect to the daemon"
        " of this host by its unix:// address",
        code="unsupported",
    )


def not_visible(address: object) -> TransportError:
    return TransportError(
        f"{address} registered the namespace, but its shared memory does not show it;"
        " the daemon may have been restarted in between: try again",
        code="namespace_not_shared",
    )
