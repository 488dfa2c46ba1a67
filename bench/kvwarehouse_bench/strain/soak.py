"""`make soak`: does anything grow, or go wrong, when a daemon is used for long?

    make soak                            # KVW_SOAK_MINUTES (20)
    make soak ARGS="--minutes 5 --json"

A daemon with small tiers, local and remote clients in threads that store, load, pin, leave and come
back; evictions, promotions, clears and flushes all the time. In the first half clients in processes
of their own are killed in the middle of stores, and the daemon is killed and stopped and started
again. Then, with everybody gone, a snapshot is taken of the daemon that serves then; after the
second half another. Nothing may have grown beyond what resource_snapshot.py allows, and nothing
wrong may have been loaded. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Final

from kvwarehouse_bench.harness.client_process import ClientProcess
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_bench.harness.until import until
from kvwarehouse_bench.strain import resource_snapshot
from kvwarehouse_bench.strain.churn import PROMPTS, SPACES, Churn
from kvwarehouse_bench.strain.resource_snapshot import ResourceSnapshot

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

            until(at_rest, "sessions, pins, reserved slots and limbo end with their clients")
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
