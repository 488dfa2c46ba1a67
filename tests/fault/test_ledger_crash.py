"""Power is lost after any call of the daemon's ledger to its disk: while it writes namespaces,
clears and tombstones, and while it opens what was left.

What it reported durable stays: no clear, no forgetting and no tombstone comes undone, no namespace
is lost, no epoch falls, and nothing of it is ever taken for damaged.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.daemon import epoch_file, ledger_file, ledger_probe
from kvwarehouse.daemon.ledger import Ledger
from kvwarehouse.daemon.ledger_file import DamagedLedgerError
from kvwarehouse.daemon.logs import Log
from testkit import tally
from testkit.file_journal import Journal, trace

pytestmark = pytest.mark.timeout(600)

WAREHOUSE = b"w" * 16
FAULT = "power lost at a call of the ledger to its disk"

# A few lives of a ledger. What is durable is marked, in the order in which it became so.
PROGRAM = """
import io, json, random, sys
from kvwarehouse.daemon.disk_calls import DiskCalls
from kvwarehouse.daemon.ledger import Ledger
from kvwarehouse.daemon.logs import Log
from kvwarehouse.types import Namespace

DiskCalls.wait_for = lambda self, call: call()  # in this thread: strace follows no other
folder, marks, seed = sys.argv[1], open(sys.argv[2], "w"), int(sys.argv[3])
rng = random.Random(seed)

def mark(**what):
    marks.write(json.dumps(what) + "\\n")
    marks.flush()

for life in range(3):
    ledger = Ledger([folder], b"w" * 16, Log("json", io.StringIO()), expected=life > 0)
    mark(opened=True)
    ledger.keep_ahead(rng.randrange(1, 1 << 60))
    mark(log_end=ledger.log_end)
    for _ in range(6):
        known, what = len(ledger.namespaces()), rng.random()
        which = rng.sample([each.space.id for each in ledger.namespaces()], rng.randint(0, known))
        if what < 0.4 or known == 0:
            space = Namespace(model=f"m{rng.randrange(6)}", weights="w", dtype="b", layout="l/1",
                              page_tokens=4, page_bytes=8)
            if ledger.find(space.id) is None:
                ledger.add(ledger.propose(space))
            mark(namespace=space.id.hex())
        elif what < 0.7:
            forget = what < 0.55
            epoch, durable = ledger.forget(which) if forget else ledger.raise_epoch(which)
            assert durable
            mark(epoch=epoch, forgotten=forget, namespaces=[each.hex() for each in which])
        else:
            keys = [rng.randbytes(16) for _ in range(rng.randint(1, 90))]
            graves = {key: rng.randrange(1, 1 << 40) for key in keys}
            assert ledger.bury(graves.items())
            mark(graves={key.hex(): at for key, at in graves.items()})
    if rng.random() < 0.5:
        ledger.close()
"""


class Promised:
    """What the marks so far say is durable."""

    def __init__(self, marks: list[str]) -> None:
        self.opened = False
        self.epoch = self.floor = self.log_end = 0
        self.cleared: dict[str, int] = {}
        self.namespaces: set[str] = set()
        self.graves: dict[str, int] = {}
        for line in marks:
            self._add(json.loads(line))

    def _add(self, mark: dict[str, Any]) -> None:
        self.opened = self.opened or "opened" in mark
        if "namespace" in mark:
            self.namespaces.add(mark["namespace"])
        if "epoch" in mark:
            self.epoch = mark["epoch"]
            self.cleared.update(dict.fromkeys(mark["namespaces"], mark["epoch"]))
            if mark["forgotten"]:
                self.floor = mark["epoch"]
                self.namespaces -= set(mark["namespaces"])
        self.graves.update(mark.get("graves", {}))
        self.log_end = mark.get("log_end", self.log_end)

    def check(self, ledger: Ledger) -> None:
        assert not ledger.lost, ledger.reason
        assert ledger.health == "ok", ledger.reason
        assert ledger.epoch >= self.epoch
        found = {each.space.id.hex(): each for each in ledger.namespaces()}
        assert ledger.floor >= self.floor
        for name in self.namespaces:
            # Or it was being forgotten.
            assert name in found or ledger.floor > self.floor
        for name, epoch in self.cleared.items():
            assert (found[name].clear_epoch if name in found else ledger.floor) >= epoch
        tombstones = {key.hex(): at for key, at in ledger.tombstones()}
        assert self.graves.items() <= tombstones.items()
        assert ledger.log_end >= self.log_end


def read_in_a_fork(path: str, timeout_s: float = 0) -> dict[bytes, bytes]:
    """ledger_file.read without the start of an interpreter: thousands of them."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(readable)
            sys.stdout = io.TextIOWrapper(os.fdopen(writable, "wb"))
            ledger_probe.main(path)
            sys.stdout.flush()
            status = 0
        finally:
            os._exit(status)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        data = pipe.read()
    status = os.waitpid(child, 0)[1]
    if status != 0:
        raise DamagedLedgerError(f"reading it ended with {status}")
    return ledger_file._decode(data)


def check_image(folder: Path, files: dict[str, bytes], promised: Promised) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    # By itself, too: it is all that is left of the clears if the ledger is lost.
    assert epoch_file.read(str(folder), WAREHOUSE) >= promised.epoch
    ledger = Ledger([str(folder)], WAREHOUSE, Log("json", io.StringIO()), expected=promised.opened)
    try:
        promised.check(ledger)
        before = ledger.epoch
        assert ledger.raise_epoch([]) == (before + 1, True)
    finally:
        ledger.close()


@pytest.fixture
def in_memory(tmp_path: Path) -> Any:
    folder = Path(f"/dev/shm/kvw-test-ledger-{os.getpid()}")
    yield folder if os.access("/dev/shm", os.W_OK) else tmp_path / "image"
    shutil.rmtree(folder, ignore_errors=True)


def test_ledger_after_a_loss_of_power_at_any_call_keeps_what_it_reported_durable(
    tmp_path: Path, in_memory: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: the ledger's calls cannot be recorded")
    monkeypatch.setattr(ledger_file, "read", read_in_a_fork)
    for round_number in range(tally.rounds(1)):
        folder, marks = tmp_path / f"ledger{round_number}", tmp_path / "marks"
        folder.mkdir()
        seed = str(rng.getrandbits(32))
        lines = trace(
            [sys.executable, "-P", "-c", PROGRAM, str(folder), str(marks), seed], tmp_path / "log"
        )
        journal = Journal(folder, marks)
        images = 0
        for line in lines:
            if not journal.step(line):
                continue
            promised = Promised(journal.marked)
            for how in ("none", "all", "torn"):
                check_image(in_memory, journal.left(how, rng), promised)
                tally.count(FAULT)
                images += 1
        assert images > 100, "the calls were not recorded"
        assert len(journal.marked) == 3 * 8
        # The model of the disk ends where the disk has ended.
        for name, data in journal.left("all", rng).items():
            assert (folder / name).read_bytes().rstrip(b"\0") == data.rstrip(b"\0"), name
