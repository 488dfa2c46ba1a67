"""In place of the remote tier's worker: says what a test has it say, and touches no store.

    python fake_worker.py FOLDER

In FOLDER the file `start-N` has, for the Nth start, lines to say; behind them a word of what to do
then: `report` (the last line again and again), `silent`, `deaf` (reports, and reads nothing more),
`end CODE`. `start-any` is for all others. `pids` gets a line a start, `settings` what it was told
first, before it says anything, `told` what came then. It starts often, so it imports little.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path


def main(folder: Path) -> None:
    with (folder / "pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    number = len((folder / "pids").read_text().splitlines())
    orders = folder / f"start-{number}"
    if not orders.exists():
        orders = folder / "start-any"
    *said, order = orders.read_bytes().splitlines(keepends=True)
    _keep(folder, sys.stdin.buffer.readline())
    if order != b"deaf\n":
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    for line in said:
        _say(line)
    word, _, rest = order.decode().strip().partition(" ")
    if word == "end":
        os.write(2, b"PUT https://store/b?sig=planted failed\n")
        os._exit(int(rest))
    while True:
        if word in ("report", "deaf"):
            _say(said[-1])
        time.sleep(0.02)


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _keep(folder: Path, settings: bytes) -> None:
    """Whole, or as those of the start before."""
    (folder / "settings.new").write_bytes(settings)
    (folder / "settings.new").replace(folder / "settings")


def _end_with_stdin() -> None:
    while line := sys.stdin.buffer.readline():
        with (Path(sys.argv[1]) / "told").open("ab") as told:
            told.write(line)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
