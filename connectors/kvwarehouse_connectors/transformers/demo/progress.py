"""What the demo says while it works: a bar on a terminal, a line now and then elsewhere.

Not thread-safe, but for the bar, which rich draws in a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_QUIET_S = 10.0
"""Without a terminal, a line at most this often."""
_REFRESHES_PER_S = 4
"""Drawing costs processor time, of which the measurements on two cores want all."""


class Teller:
    """A context manager. console: where it speaks; lines and tables printed there while it is open
    appear above the bar. A stage (a row, say) has steps, each with an expected length in seconds,
    of which the bar is made, and in each step the model is called a number of times."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._bar = Progress(
            BarColumn(20),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            refresh_per_second=_REFRESHES_PER_S,
            # Else what the demo prints to a pipe would go to the terminal instead.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=None)
        self._stage = self._step = ""
        self._done_s = self._step_s = 0.0
        self._calls = self._calls_done = 0
        self._spoke = clock()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=not self._console.is_terminal)

    def begin(self, stage: str, expected_s: float | None = None) -> None:
        """Another stage begins. expected_s: None where nothing is known of its length."""
        self._stage, self._step = stage, ""
        self._done_s = self._step_s = 0.0
        self._bar.update(self._task, total=expected_s, completed=0, description=stage)
        if not self._console.is_terminal:
            about = f", about {expected_s:,.0f} s" if expected_s else ""
            self._line(f"... {stage}{about}")

    def step(self, text: str, expected_s: float = 0.0, calls: int = 0) -> None:
        """The step before is done, this one begins. calls: how often it calls the model."""
        self._done_s += self._step_s
        self._step, self._step_s = text, expected_s
        self._calls, self._calls_done = calls, 0
        self._draw()

    def tick(self) -> None:
        """The model was called once more."""
        self._calls_done = min(self._calls, self._calls_done + 1)
        self._draw()
        if not self._console.is_terminal and self._clock() >= self._spoke + _QUIET_S:
            share = f", {self._calls_done / self._calls:.0%}" if self._calls else ""
            self._line(f"... {self._stage}: {self._step}{share}")

    def __enter__(self) -> Self:
        if self._console.is_terminal:  # rich 13.0 ends even a bar that is disabled with a line
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def _draw(self) -> None:
        share = self._calls_done / self._calls if self._calls else 0.0
        self._bar.update(
            self._task,
            completed=self._done_s + share * self._step_s,
            description=f"{self._stage}: {self._step}",
        )

    def _line(self, text: str) -> None:
        self._spoke = self._clock()
        self.say(text)
