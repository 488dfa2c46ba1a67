"""`make soak`: does anything grow, or go wrong, when a daemon is used for long?

    make soak                            # KVW_SOAK_MINUTES (20)
    make soak ARGS="--minutes 5 --json"

A daemon with small tiers, local and remote clients in threads that store, load, pin, leave and come
back; evictions, promotions, clears and flushes all the time. In the first half clients in processes
of their own are killed in the middle of stores, and the daemon is killed and stopped and started
again. Then, with everybody gone, a snapshot is taken of the daemon that serves then; after the
second half another. Nothing may have grown beyond what resource_snapshot.py allows, and nothing
wrong may have been loaded. Exit status 1 otherwise.

Churn is those clients, until told to stop. Every byte that is loaded is judged. A call that finds
no daemon, or no room, is counted and tried no further: daemons end and begin while this goes on.
Anything else that is raised ends the thread and is kept as its failure. Counters are single words,
each with one writer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

import kvwarehouse as kvw
from kvwarehouse_bench.harness.client_process import ClientProcess
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_bench.strain import resource_snapshot
from kvwarehouse_bench.strain.resource_snapshot import ResourceSnapshot

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

LOCAL, REMOTE = 3, 1
PROGRESS_S: Final = 15.0
WARM_UP: Final = 0.1  # of the time, by the daemon that is watched

# Stores the same prompts over and over; killed in the middle of it.
VICTIM = """
space = kvw.Namespace(**given["space"])
ns = client.open(space)
say("ready")
while True:
    for number in range(given["prompts"]):
        nodes = [number << 8 | place for place in range(24)]
        tokens = [n * space.page_tokens + at for n in nodes for at in range(space.page_tokens)]
        pins = ns.pin(tokens)
        ns.store(tokens, pages_of(nodes, 0, 0, space.page_bytes), timeout_s=20)
"""


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


class Soak:
    def __init__(self, serving: Serving, minutes: float, seed: int, *, quiet: bool) -> None:
        self.serving, self.quiet, self.seed = serving, quiet, seed
        self.rng = random.Random(seed)
        self.seconds = minutes * 60
        self.began = time.monotonic()
        self.done: Counter[str] = Counter()
        self.never = threading.Event()
        self.said_at = 0.0
        self.life = self.sessions_of_its_own = 0

    def run(self) -> tuple[ResourceSnapshot, ResourceSnapshot]:
        """The snapshot after the warm-up, and the one at the end."""
        self.serving.start()
        with self.serving.connect_remote(timeout_s=60) as client:
            self.sessions_of_its_own = client.status()["core"]["sessions"]
            for space in SPACES:  # what an operator names is there, however late the clients come
                client.open(space)
        self.churn(until_s=self.seconds * 0.45, unrest=True)
        self.restart()  # the daemon that is watched has a start like any
        self.churn(until_s=self.seconds * (0.45 + WARM_UP), unrest=False)
        before = self.snapshot()
        self.churn(until_s=self.seconds, unrest=False)
        return before, self.snapshot()

    def churn(self, until_s: float, *, unrest: bool) -> None:
        self.life += 1
        clients = [
            Churn(self.serving, f"{self.seed}:{self.life}:{number}", remote=number >= LOCAL)
            for number in range(LOCAL + REMOTE)
        ]
        for client in clients:
            client.start()
        while time.monotonic() - self.began < until_s and not any(c.failure for c in clients):
            self.never.wait(0.2)
            self.administer()
            if unrest and self.rng.random() < 0.03:
                self.restart()
            if unrest and self.rng.random() < 0.02:
                self.kill_a_client()
            self.progress(clients)
        for client in clients:
            client.stop()
            self.done.update(client.done)
        failures = [client.failure for client in clients if client.failure]
        if failures:
            raise AssertionError(failures[0])

    def administer(self) -> None:
        what = self.rng.random()
        with self.serving.connect_remote(timeout_s=60) as admin:
            if what < 0.3:
                admin.evict(self.rng.choice(SPACES), self.rng.randrange(1, 200), "dram")
            elif what < 0.4:
                admin.evict(None, self.rng.randrange(1, 100), "all")
            elif what < 0.5:
                admin.flush(60)
            elif what < 0.52:
                admin.clear(self.rng.choice(SPACES))
            elif what < 0.54:
                admin.sweep()
        self.done["administrators"] += 1

    def restart(self) -> None:
        if self.rng.random() < 0.5:
            self.serving.kill()
        else:
            self.serving.stop()
        self.serving.start()
        self.done["daemon restarts"] += 1

    def kill_a_client(self) -> None:
        fields = self.rng.choice(SPACES).to_fields()
        with ClientProcess(self.serving.address, VICTIM, space=fields, prompts=PROMPTS) as process:
            process.hear()
            self.never.wait(self.rng.uniform(0.0, 0.3))  # anywhere in it
        self.done["clients killed"] += 1

    def snapshot(self) -> ResourceSnapshot:
        """Once all that ends by itself has ended."""
        with self.serving.connect_remote(timeout_s=60) as client:
            client.flush(60)

            def at_rest() -> bool:
                core = client.status()["core"]
                dram, nvme = core["tiers"]["dram"], core["tiers"]["nvme"]
                moving = dram["reserved_slots"] + dram["limbo_slots"] + dram["zombie_slots"]
                gone = core["sessions"] <= self.sessions_of_its_own
                return gone and not (moving + core["pins"]["held"] + nvme["queued_records"])

            eventually(at_rest, "sessions, pins, reserved slots and limbo end with their clients")
            core = client.status()["core"]
            assert core["loads"]["failed"].get("mismatch", 0) == core["quarantined"] == 0, core
            return resource_snapshot.take(self.serving, client)

    def progress(self, clients: list[Churn]) -> None:
        now = time.monotonic() - self.began
        if self.quiet or now - self.said_at < PROGRESS_S:
            return
        self.said_at = now
        total = self.done + sum((client.done for client in clients), Counter[str]())
        said = ", ".join(f"{total[what]} {what}" for what in ("pages stored", "pages loaded"))
        print(f"{now:6.0f} s of {self.seconds:.0f}: {said}", file=sys.stderr, flush=True)


def table(before: ResourceSnapshot, after: ResourceSnapshot) -> str:
    rows = [f"{'':28}{'warm':>10}{'end':>10}{'may grow':>10}"]
    for what, value in after.items():
        mark = "" if value <= before[what] + resource_snapshot.allowed(what) else "   GREW"
        rows.append(
            f"{what:28}{before[what]:10.0f}{value:10.0f}{resource_snapshot.allowed(what):10.0f}{mark}"
        )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    minutes = float(os.environ.get("KVW_SOAK_MINUTES", "20"))
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--json", action="store_true", help="figures for machines")
    arguments = parser.parse_args()
    seed = int(os.environ.get("KVW_SEED", str(secrets.randbits(32))), 0)
    print(f"seed: KVW_SEED={seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="kvw-soak-") as disk:
        serving = Serving(
            Path(disk), dram="24MiB", nvme_capacity="64MiB", nvme_segment="4MiB", grace_s="0.2",
            flush_interval_s="0.5",
        )  # fmt: skip
        soak = Soak(serving, arguments.minutes, seed, quiet=arguments.json)
        try:
            before, after = soak.run()
        finally:
            serving.remove()
    bad = resource_snapshot.grown(before, after)
    if arguments.json:
        print(json.dumps({"done": soak.done, "warm": before, "end": after, "grew": bad}))
    else:
        print(table(before, after))
        print(", ".join(f"{count} {what}" for what, count in sorted(soak.done.items())))
        print("FAILED: these grew: " + ", ".join(bad) if bad else "ok: nothing grew, nothing wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
