"""What the demo says while it works, on stderr: a bar on a terminal, a line a step elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Teller:
    """A context manager. Steps have an expected length in seconds, of which the bar is made."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            BarColumn(24),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._current_s = 0.0

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def expect(self, total_s: float) -> None:
        """From now on `total_s` are to come."""
        self._bar.update(self._task, total=total_s, completed=0)
        self._current_s = 0.0

    def step(self, text: str, expected_s: float = 0.0) -> None:
        """The step before is done, this one begins."""
        self._bar.update(self._task, advance=self._current_s, description=text)
        self._current_s = expected_s
        if not self._console.is_terminal:
            self.say(f"... {text}")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
