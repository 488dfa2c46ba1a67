"""A hold on pages: while it lasts they stay in DRAM, where they are."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from kvwarehouse.client.transport import Pinned


class NoPins:
    """Nothing held."""

    pages = 0

    def release(self) -> None:
        """There is nothing to let go."""


class Pins:
    """Returned by `ns.pin`; also a context manager. Survives a restart of the daemon, ends with
    release(), with the block, or with this process."""

    def __init__(self, pinned: Pinned) -> None:
        self._pinned = pinned

    @property
    def pages(self) -> int:
        """Pages held, in order from the first that was asked for."""
        return self._pinned.pages

    def release(self) -> None:
        """Lets them go, after all that reads them has ended. More than once is once."""
        self._pinned.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
