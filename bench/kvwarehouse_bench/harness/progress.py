"""What a bench says while it works, on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINE_EVERY_S = 15.0


class Teller:
    """A context manager. Work is counted in any unit, of which `expect` says how much there is."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            BarColumn(24),
            TimeElapsedColumn(),
            TextColumn("of about"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._said_at_s = 0.0

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def expect(self, work: float) -> None:
        self._bar.reset(self._task, total=work)

    def step(self, text: str, work: float = 0.0) -> None:
        """What begins now; `work` is done."""
        self._bar.update(self._task, advance=work, description=text)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said_at_s > _LINE_EVERY_S:
            self._said_at_s = now
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
