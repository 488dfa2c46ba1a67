"""A hold on pages: while it lasts they stay in DRAM, where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from kvwarehouse import core


class Pins:
    """Returned by `ns.pin`; also a context manager. Survives a restart of the daemon and the close
    of its client, ends with release(), with the block, or with this process."""

    def __init__(self, held: core.Pins | None) -> None:
        """None: no page is held."""
        self._held = held

    @property
    def pages(self) -> int:
        """Pages held, in order from the first that was asked for."""
        return 0 if self._held is None else self._held.pages

    def release(self) -> None:
        """Lets them go, after all that reads them has ended. More than once is once."""
        if self._held is not None:
            self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
