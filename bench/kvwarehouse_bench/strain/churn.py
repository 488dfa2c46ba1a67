"""Clients that store, load, pin, go and come back, each in a thread of its own, until told to stop.

Every byte that is loaded is judged. A call that finds no daemon, or no room, is counted and tried
no further: daemons end and begin while this goes on. Anything else that is raised ends the thread
and is kept as its failure. Counters are single words, each with one writer.
"""

from __future__ import annotations

import contextlib
import random
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np

import kvwarehouse as kvw
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import Serving

SPACES: Final = (
    kvw.Namespace(
        model="small", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=8192
    ),
    kvw.Namespace(
        model="wide", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=60_000
    ),
)
PROMPTS: Final = 400  # more than both tiers hold
LONGEST: Final = 24
TIMEOUT_S: Final = 20.0


class Churn:
    """One client. `remote`: over gRPC."""

    def __init__(self, serving: Serving, seed: str, *, remote: bool) -> None:
        self._serving, self._remote = serving, remote
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"churn {seed}")
        self._client: kvw.Client | None = None
        self._pins: list[kvw.Pins] = []
        self.done: Counter[str] = Counter()
        self.failure = ""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns once its client is closed."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and not self.failure:
                self._step()
        except BaseException:  # noqa: BLE001  the thread's edge; the soak reads it
            self.failure = traceback.format_exc()
        finally:
            self._leave()

    def _step(self) -> None:
        acts: tuple[Callable[[], None], ...] = (
            self._store, self._store, self._load, self._load, self._load, self._pin, self._unpin,
        )  # fmt: skip
        act = self._leave if self._rng.random() < 0.01 else self._rng.choice(acts)
        try:
            act()
        except (kvw.TransportError, kvw.CapacityError, kvw.PinError) as error:
            self.done[error.code] += 1
            self._stop.wait(0.02)

    def _open(self) -> tuple[kvw.OpenNamespace, kvw.Namespace]:
        if self._client is None:
            connect = self._serving.connect_remote if self._remote else self._serving.connect
            self._client = connect(timeout_s=TIMEOUT_S)
            self.done["clients"] += 1
        space = self._rng.choice(SPACES)
        return self._client.open(space), space

    def _prompt(self, space: kvw.Namespace) -> tuple[list[int], np.ndarray]:
        """Some prompts are asked for far more often than others, as in life."""
        number = int(PROMPTS * self._rng.random() ** 3)
        count = 1 + self._rng.randrange(LONGEST)
        nodes = [number << 8 | place for place in range(count)]
        tokens = [
            node * space.page_tokens + at for node in nodes for at in range(space.page_tokens)
        ]
        return nodes, np.asarray(tokens, np.uint32)

    def _store(self) -> None:
        opened, space = self._open()
        nodes, tokens = self._prompt(space)
        result = opened.store(tokens, pages_of(nodes, 0, 0, space.page_bytes), timeout_s=TIMEOUT_S)
        self.done["pages stored"] += result.stored

    def _load(self) -> None:
        opened, space = self._open()
        nodes, tokens = self._prompt(space)
        out = np.zeros((len(nodes), space.page_bytes), np.uint8)
        loaded = opened.load(tokens, out, timeout_s=TIMEOUT_S)
        check_pages(out[:loaded], nodes[:loaded], 0, 0)
        assert "mismatch" not in loaded.missed, loaded.missed
        self.done["pages loaded"] += int(loaded)

    def _pin(self) -> None:
        if self._remote:
            return self._load()  # pins hold shared memory
        if len(self._pins) > 4:
            return self._unpin()
        opened, space = self._open()
        self._pins.append(opened.pin(self._prompt(space)[1], timeout_s=TIMEOUT_S))
        self.done["pages pinned"] += self._pins[-1].pages

    def _unpin(self) -> None:
        if self._pins:
            self._pins.pop(self._rng.randrange(len(self._pins))).release()

    def _leave(self) -> None:
        """As often as not without letting go of what it has pinned."""
        if self._rng.random() < 0.5:
            while self._pins:
                self._pins.pop().release()
        self._pins.clear()
        if self._client is not None:
            with contextlib.suppress(kvw.TransportError):
                self._client.close()
        self._client = None
