"""Room for one engine at a time: tests that want the same one share it, and another one replaces
it. Engines are seconds to start and most of a small machine while they run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol


class Resident(Protocol):
    """An engine, or a server."""

    options: dict[str, Any]

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    @property
    def alive(self) -> bool: ...


class Bay:
    """Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._resident: Any = None
        self.starts = 0

    def get(self, kind: Any, options: dict[str, Any]) -> Any:
        """The running one of this kind and these options, or a new one. Raises StartError."""
        if not self._holds(kind, options):
            self.empty()
            resident = kind(options, self._folder)
            resident.start()
            self.starts += 1
            self._resident = resident
        return self._resident

    def empty(self) -> None:
        """Ends what runs, as its user would."""
        resident, self._resident = self._resident, None
        if resident is not None:
            resident.stop()

    def log(self) -> str:
        """The end of what the one that runs has said."""
        return self._resident.group.tail() if self._resident is not None else ""

    def _holds(self, kind: Any, options: dict[str, Any]) -> bool:
        resident = self._resident
        return (
            isinstance(resident, kind)
            and resident.alive
            and json.dumps(resident.options) == json.dumps(options)
        )
