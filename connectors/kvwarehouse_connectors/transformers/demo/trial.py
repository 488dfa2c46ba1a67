"""The measurements, in order: a document that grows, its questions, and a daemon that is badly
treated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvwarehouse_connectors.transformers.demo.budget import Budget, OutOfTimeError
from kvwarehouse_connectors.transformers.demo.outcome import WAYS, Cell, Control, Row
from kvwarehouse_connectors.transformers.demo.pace import ANSWER_TOKENS, RUNS, Pace
from kvwarehouse_connectors.transformers.demo.progress import Teller
from kvwarehouse_connectors.transformers.demo.sample import Sample, ask, finish
from kvwarehouse_connectors.transformers.demo.station import OPTIONS, Station
from kvwarehouse_connectors.transformers.demo.subject import Subject
from kvwarehouse_connectors.transformers.demo.text import Workload, common_tokens
from kvwarehouse_connectors.transformers.grid import ChunkGrid

_READER = 0
_ASKER = 1


@dataclass(frozen=True)
class Findings:
    """pages_stored: by reading the document."""

    rows: tuple[Row, ...]
    control: Control
    pages_stored: int


class Trial:
    """Runs once."""

    def __init__(
        self,
        subject: Subject,
        work: Workload,
        station: Station,
        budget: Budget,
        teller: Teller,
        pace: Pace,
    ) -> None:
        self._subject = subject
        self._work = work
        self._station = station
        self._pace = pace
        self._budget = budget
        self._teller = teller
        self._rows: list[Row] = []
        self._control: Control | None = None
        self._proven = False
        """True once there is a run to show: what comes after it may be given up."""
        self._pages_stored = 0

    def run(self, lengths: Sequence[int], show: Callable[[Row], None]) -> Findings:
        """Measures the first of `lengths`, then each that fits into the time. show: called with
        each row as it is finished."""
        # Each call of the model is one chunk of a prompt, or one token of an answer.
        hook = self._subject.model.register_forward_hook(self._after_forward)
        try:
            for tokens in lengths:
                row = self._row_in_time(tokens) if self._affordable(tokens) else None
                if row is None:
                    break
                self._rows.append(row)
                show(row)
        finally:
            hook.remove()
        assert self._control is not None, "the first row is never left out"
        return Findings(tuple(self._rows), self._control, self._pages_stored)

    @property
    def _known(self) -> int:
        """Tokens of the document that were read."""
        return self._rows[-1].prompt_tokens if self._rows else 0

    def _affordable(self, tokens: int) -> bool:
        expected_s = self._pace.row_s(tokens, self._known)
        if not self._rows or self._budget.fits(expected_s):
            return True
        self._teller.say(
            f"{tokens:,} tokens would take about {expected_s:,.0f} s more on this machine now, so"
            f" they are left out (--max-tokens {tokens} measures them)."
        )
        return False

    def _row_in_time(self, tokens: int) -> Row | None:
        try:
            return self._row(tokens)
        except OutOfTimeError:
            self._teller.say(
                f"{tokens:,} tokens take longer than the machine promised: other work came. They"
                f" are left out (--max-tokens {tokens} measures them)."
            )
            return None

    def _after_forward(self, *_: Any) -> None:
        self._teller.tick()
        if self._proven:
            self._budget.check()

    def _row(self, tokens: int) -> Row:
        known = self._known
        self._teller.begin(f"{tokens:,} tokens", self._pace.row_s(tokens, known))
        self._read_document(tokens, known)
        first = self._run(tokens, 1)
        self._proven = True
        runs = [first, *self._more_runs(tokens)]
        cells = {way: Cell(tuple(run[way] for run in runs)) for way in ("computed", *WAYS)}
        return Row(tokens, self._expected(tokens), OPTIONS.page_tokens, **cells)

    def _read_document(self, tokens: int, known: int) -> None:
        """Another user's question puts the document into the warehouse, in both tiers."""
        chunks = (tokens - known) // OPTIONS.chunk_tokens
        self._teller.step("reading and storing", self._pace.read_s(tokens, known), chunks)
        self._pages_stored += self._station.store(self._work.prompt(tokens, _READER))
        # A page of an earlier row may be left on NVMe only: one load brings all of them into DRAM.
        self._station.reuser.load_prefix(self._work.prompt(tokens, _ASKER))

    def _more_runs(self, tokens: int) -> list[dict[str, Sample]]:
        """One run proves as much as two; it is only more at the mercy of other work."""
        runs: list[dict[str, Sample]] = []
        for number in range(2, RUNS + 1):
            try:
                if self._budget.fits(self._pace.run_s(tokens)):
                    runs.append(self._run(tokens, number))
                    continue
            except OutOfTimeError:
                pass
            self._teller.say(
                f"{tokens:,} tokens: run {number} of {RUNS} did not fit into the time."
            )
            break
        return runs

    def _run(self, tokens: int, number: int) -> dict[str, Sample]:
        """Every cell of the row once. Only the first run writes answers, which take long."""
        answer_tokens = ANSWER_TOKENS if number == 1 else 1
        found = {}

        def asked(way: str, how: str) -> None:
            found[way] = self._asked(way, f"{how}, run {number} of {RUNS}", tokens, answer_tokens)

        asked("computed", "computing all of it")
        self._pace = self._pace.seen(tokens, found["computed"].first_token_s)
        asked("dram", "loading from DRAM")
        if self._control is None:
            self._control = self._damaged(tokens, found["dram"])
        self._restarted("killing the daemon", self._station.restart_after_kill)
        asked("dram_after_kill", "loading from DRAM after kill -9")
        self._restarted("deleting the DRAM tier", self._station.restart_without_dram)
        asked("nvme", "loading from NVMe")
        return found

    def _asked(self, way: str, how: str, tokens: int, answer_tokens: int) -> Sample:
        computed = way == "computed"
        answer_s = self._pace.answer_s() if answer_tokens > 1 else 0.0
        expected_s = self._pace.prompt_s(tokens) if computed else self._pace.rest_s(tokens)
        chunks = tokens // OPTIONS.chunk_tokens if computed else 1
        self._teller.step(how, expected_s + answer_s, chunks + answer_tokens - 1)
        prefiller = self._station.computer if computed else self._station.reuser
        ids = self._work.prompt(tokens, _ASKER)
        return ask(prefiller, self._subject.model, ids, answer_tokens)

    def _restarted(self, how: str, restart: Callable[[], None]) -> None:
        self._teller.step(f"{how}, starting it again", self._pace.start_s)
        restart()
        self._pace = replace(self._pace, start_s=self._station.start_s)

    def _damaged(self, tokens: int, whole: Sample) -> Control:
        """Zeroes the middle one of the loaded pages, in this process's cache."""
        self._teller.step("control: one page zeroed", self._pace.answer_s(), ANSWER_TOKENS)
        ids = self._work.prompt(tokens, _ASKER)
        prefix = self._station.reuser.load_prefix(ids)
        page = prefix.reuse.tokens_loaded // OPTIONS.page_tokens // 2
        place = slice(page * OPTIONS.page_tokens, (page + 1) * OPTIONS.page_tokens)
        for layer in prefix.cache.layers:
            layer.keys[:, :, place].zero_()
            layer.values[:, :, place].zero_()
        result = self._station.reuser.complete(prefix, store=False)
        return Control(tokens, page, whole, finish(self._subject.model, ids, result, ANSWER_TOKENS))

    def _expected(self, tokens: int) -> int:
        """Tokens of a prompt that are stored, on the grid."""
        grid = ChunkGrid(OPTIONS.page_tokens, OPTIONS.chunk_tokens)
        asked, read = self._work.prompt(tokens, _ASKER), self._work.prompt(tokens, _READER)
        shared = common_tokens(asked, read) // OPTIONS.page_tokens * OPTIONS.page_tokens
        return grid.reusable_tokens(tokens, min(shared, grid.storable_tokens(tokens)))
