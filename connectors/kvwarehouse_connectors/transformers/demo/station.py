"""The model joined to the demo's daemon, and the ways in which that daemon is badly treated.

Not thread-safe. After each start a short prompt is loaded, and one computed, before anything is
timed: the first call of a connection and the first pass of a model are slower than all others.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import kvwarehouse as kvw
from kvwarehouse_connectors.transformers import PrefillOptions, WarehousePrefill
from kvwarehouse_connectors.transformers.demo.daemon import DemoDaemon
from kvwarehouse_connectors.transformers.demo.subject import Subject

# Small chunks, so that little is left to compute after a load. They cost the computed column: in
# chunks of 128 a prompt takes up to twice as long as in one piece, and the demo prints both times.
OPTIONS = PrefillOptions(page_tokens=64, chunk_tokens=128, load_timeout_s=60.0)


class Station:
    """Also a context manager, which starts the daemon. warm_ids: a prompt of a few chunks that
    begins like no other, to warm up with."""

    def __init__(self, subject: Subject, daemon: DemoDaemon, warm_ids: list[int]) -> None:
        self._subject = subject
        self._daemon = daemon
        self._warm_ids = warm_ids
        self._open = ExitStack()
        self.start_s = 0.0
        """What the last start took, with all that belongs to it."""

    def restart_after_kill(self) -> None:
        """`kill -9`: the DRAM tier stays as the daemon left it."""
        self._restart(lost_dram=False)

    def restart_without_dram(self) -> None:
        """A clean stop, then the DRAM tier is deleted: what is left is on NVMe."""
        self._restart(lost_dram=True)

    def store(self, ids: list[int]) -> int:
        """Reads a prompt, and stores it in both tiers; returns how many of its pages were new."""
        before = self.reuser.stats().pages_stored
        self.reuser.prefill(ids)
        if not self.reuser.flush() or self._client.flush().pending:
            raise kvw.TransportError(
                "the document was not stored in time; the machine may be overloaded, try again",
                code="flush_timeout",
            )
        return self.reuser.stats().pages_stored - before

    def __enter__(self) -> Self:
        started = time.perf_counter()
        self._start()
        self.start_s = time.perf_counter() - started
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def _restart(self, *, lost_dram: bool) -> None:
        started = time.perf_counter()
        self._open.close()
        if lost_dram:
            self._daemon.stop()
            self._daemon.drop_dram()
        else:
            self._daemon.kill()
        self._start()
        self.start_s = time.perf_counter() - started

    def _start(self) -> None:
        self._client = self._open.enter_context(self._daemon.start())
        self.reuser = self._joined(self._subject.weights)
        # Nothing is ever stored under this name, so a prompt is looked up and then computed.
        self.computer = self._joined(f"{self._subject.weights}/computed")
        if not self.reuser.prefill(self._warm_ids, store=False).tokens_loaded:
            self.store(self._warm_ids)
            self.reuser.prefill(self._warm_ids, store=False)
        self.computer.prefill(self._warm_ids[: OPTIONS.chunk_tokens], store=False)

    def _joined(self, weights: str) -> WarehousePrefill:
        return self._open.enter_context(
            WarehousePrefill(self._subject.model, self._client, weights=weights, options=OPTIONS)
        )
