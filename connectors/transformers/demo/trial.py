"""The measurements, in order: one document, its questions, and a daemon that is badly treated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import kvwarehouse as kvw
from kvwarehouse_connectors.transformers import PrefillOptions, WarehousePrefill
from kvwarehouse_connectors.transformers.demo.daemon import DemoDaemon
from kvwarehouse_connectors.transformers.demo.outcome import Control, Row
from kvwarehouse_connectors.transformers.demo.pace import ANSWER_TOKENS, Pace
from kvwarehouse_connectors.transformers.demo.progress import Teller
from kvwarehouse_connectors.transformers.demo.sample import Sample, ask, finish
from kvwarehouse_connectors.transformers.demo.subject import Subject
from kvwarehouse_connectors.transformers.demo.text import Workload, common_tokens
from kvwarehouse_connectors.transformers.grid import ChunkGrid

# Small chunks, so that little is left to compute after a load: a prompt in chunks of 128 takes
# about a tenth longer than in one piece.
OPTIONS = PrefillOptions(page_tokens=64, chunk_tokens=128, load_timeout_s=60.0)

_READER = 0
_ASKER = 1


class Trial:
    """Runs once."""

    def __init__(
        self, subject: Subject, work: Workload, daemon: DemoDaemon, teller: Teller, pace: Pace
    ) -> None:
        self._subject = subject
        self._work = work
        self._daemon = daemon
        self._teller = teller
        self._pace = pace

    def run(self, lengths: Sequence[int], budget_s: float) -> tuple[tuple[Row, ...], Control, int]:
        """Rows, the control, and how many pages reading the document stored. Leaves out the longest
        prompts when the machine turns out too slow for budget_s."""
        with self._serving() as (client, prefiller):
            computed = self._computed(prefiller, lengths, budget_s)
            lengths = lengths[: len(computed)]
            longest = max(lengths)
            pages_stored = self._read_document(client, prefiller, longest)
            dram = self._asked("from DRAM", prefiller, lengths, self._pace.rest_s)
            control = self._control(prefiller, lengths[min(1, len(lengths) - 1)])
        self._daemon.kill()
        with self._serving() as (_, prefiller):
            after = self._asked("from DRAM after kill -9", prefiller, lengths, self._pace.rest_s)
        nvme = [self._from_nvme(tokens) for tokens in lengths]
        rows = tuple(
            Row(tokens, self._expected(tokens, longest), *samples)
            for tokens, *samples in zip(lengths, computed, dram, after, nvme, strict=True)
        )
        return rows, control, pages_stored

    def _computed(
        self, prefiller: WarehousePrefill, lengths: Sequence[int], budget_s: float
    ) -> list[Sample]:
        """Of the first two lengths at least, then as long as the whole demo fits."""
        samples: list[Sample] = []
        for count, tokens in enumerate(lengths, 1):
            if count > 2 and self._pace.demo_s(lengths[:count]) > budget_s:
                self._teller.say(
                    f"machine   busier than when it was measured: the document is cut to"
                    f" {lengths[count - 2]:,} tokens"
                )
                self._teller.expect(self._pace.demo_s(lengths[: count - 1]))
                break
            samples += self._asked("computing", prefiller, [tokens], self._pace.prompt_s)
            self._pace = self._pace.seen(tokens, samples[-1].first_token_s)
        return samples

    @contextmanager
    def _serving(self) -> Iterator[tuple[kvw.Client, WarehousePrefill]]:
        """A started daemon, a client of it, and the model joined to that, as in a new process."""
        with (
            self._daemon.start() as client,
            WarehousePrefill(
                self._subject.model, client, weights=self._subject.weights, options=OPTIONS
            ) as prefiller,
        ):
            yield client, prefiller

    def _asked(
        self,
        how: str,
        prefiller: WarehousePrefill,
        lengths: Sequence[int],
        expected_s: Callable[[int], float],
    ) -> list[Sample]:
        samples = []
        for tokens in lengths:
            expected = expected_s(tokens) + self._pace.answer_s()
            self._teller.step(f"{tokens:,} tokens, {how}", expected)
            ids = self._work.prompt(tokens, _ASKER)
            samples.append(ask(prefiller, self._subject.model, ids, ANSWER_TOKENS))
        return samples

    def _read_document(self, client: kvw.Client, prefiller: WarehousePrefill, longest: int) -> int:
        """Another user's question puts the document into the warehouse, in both tiers."""
        self._teller.step("reading the document, and storing it", self._pace.prompt_s(longest))
        prefiller.prefill(self._work.prompt(longest, _READER))
        if not prefiller.flush() or client.flush().pending:
            raise kvw.TransportError(
                "the document was not stored in time; the machine may be overloaded, try again",
                code="flush_timeout",
            )
        return prefiller.stats().pages_stored

    def _from_nvme(self, tokens: int) -> Sample:
        """Each length with a DRAM tier of its own: what one loads, the next would find in DRAM."""
        self._daemon.stop()
        self._daemon.drop_dram()
        with self._serving() as (_, prefiller):
            return self._asked("from NVMe", prefiller, [tokens], self._pace.rest_s)[0]

    def _control(self, prefiller: WarehousePrefill, tokens: int) -> Control:
        """Zeroes the middle one of the loaded pages, in this process's cache."""
        self._teller.step("control: one page zeroed")
        ids = self._work.prompt(tokens, _ASKER)
        whole = ask(prefiller, self._subject.model, ids, ANSWER_TOKENS)
        prefix = prefiller.load_prefix(ids)
        page = prefix.reuse.tokens_loaded // OPTIONS.page_tokens // 2
        place = slice(page * OPTIONS.page_tokens, (page + 1) * OPTIONS.page_tokens)
        for layer in prefix.cache.layers:
            layer.keys[:, :, place].zero_()
            layer.values[:, :, place].zero_()
        result = prefiller.complete(prefix, store=False)
        return Control(tokens, page, whole, finish(self._subject.model, ids, result, ANSWER_TOKENS))

    def _expected(self, tokens: int, longest: int) -> int:
        """Tokens of a prompt that are stored, on the grid."""
        grid = ChunkGrid(OPTIONS.page_tokens, OPTIONS.chunk_tokens)
        asked, read = self._work.prompt(tokens, _ASKER), self._work.prompt(longest, _READER)
        shared = common_tokens(asked, read) // OPTIONS.page_tokens * OPTIONS.page_tokens
        return grid.reusable_tokens(tokens, min(shared, grid.storable_tokens(longest)))
