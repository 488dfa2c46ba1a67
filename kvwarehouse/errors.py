"""Every exception that kvwarehouse raises, one tree.

    WarehouseError
    ├── UsageError       the call or its input is wrong; the same call fails again
    ├── CapacityError    refused for now, a bound is reached; retryable
    ├── PinError         a pin that is not held, or pins over their budget
    ├── StorageError     memory, a disk or a file failed, or is not ours
    ├── TransportError   no daemon, a lost connection, a deadline; retryable
    └── InternalError    a broken promise of kvwarehouse itself: please report it

A miss is a value and so is "come back later"; an exception means misused, refused for now, or
broken. Each has a stable `code` for programs, `retryable`, and `context`; its text says what
happened, to what value, and what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class WarehouseError(Exception):
    """Root of the tree. `code` is stable, lower_case, and narrower than the class."""

    kind: ClassVar[str] = "internal"
    default_code: ClassVar[str] = "error"
    default_retryable: ClassVar[bool] = False

    code: str
    retryable: bool
    context: dict[str, str]

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retryable: bool | None = None,
        context: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = self.default_code if code is None else code
        self.retryable = self.default_retryable if retryable is None else retryable
        self.context = {name: str(value) for name, value in (context or {}).items()}

    @property
    def message(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would lose the keyword arguments when an error crosses processes.
        return (_rebuild, (type(self), self.message, self.code, self.retryable, self.context))


class UsageError(WarehouseError, ValueError):
    """The call or its input is wrong. Also a ValueError, as Python callers expect."""

    kind = "usage"
    default_code = "usage"


class CapacityError(WarehouseError):
    """Refused for now because a hard bound is reached. Try later, or raise the bound."""

    kind = "capacity"
    default_code = "capacity"
    default_retryable = True


class PinError(WarehouseError):
    """A pin that is not held (any more), or a budget of pins that is used up."""

    kind = "pin"
    default_code = "pin"


class StorageError(WarehouseError):
    """Memory, a disk or a file failed, has no room, is damaged, or belongs to someone else."""

    kind = "storage"
    default_code = "storage"


class TransportError(WarehouseError):
    """No daemon, a lost connection, or a deadline that passed. Nothing half-done is visible."""

    kind = "transport"
    default_code = "transport"
    default_retryable = True


class InternalError(WarehouseError):
    """kvwarehouse broke its own promise. Please report it, with the text and the daemon's log."""

    kind = "internal"
    default_code = "internal"


BY_KIND: Mapping[str, type[WarehouseError]] = {
    cls.kind: cls
    for cls in (
        UsageError,
        CapacityError,
        PinError,
        StorageError,
        TransportError,
        InternalError,
    )
}


def from_native(kind: str, code: str, message: str) -> WarehouseError:
    """The exception for an error of the native core (native/base/error.h). Does not raise it.

    An unknown `kind` can only be a bug of the bindings, so it becomes an InternalError that
    keeps the text."""
    cls = BY_KIND.get(kind)
    if cls is None:
        return InternalError(f"{message} (unknown error kind {kind!r})", code=code)
    return cls(message, code=code)


def _rebuild(
    cls: type[WarehouseError], message: str, code: str, retryable: bool, context: dict[str, str]
) -> WarehouseError:
    return cls(message, code=code, retryable=retryable, context=context)
