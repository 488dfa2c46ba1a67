"""In place of the remote tier's worker: says what a test has it say, and touches no store.

    python fake_worker.py FOLDER

In FOLDER the file `start-N` has, for the Nth start, lines to say; behind them a word of what to do
then: `report` (the last line again and again), `silent`, `deaf` (reports, and reads nothing more),
`end CODE`. `start-any` is for all others. `pids` gets a line a start, `settings` what it was told
first, `told` what came then. It starts often, so it imports little.
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
    reads = order != b"deaf\n"
    threading.Thread(target=_end_with_stdin, args=(reads,), daemon=True).start()
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


def _end_with_stdin(reads: bool) -> None:
    settings = sys.stdin.buffer.readline()
    (Path(sys.argv[1]) / "settings").write_bytes(settings)
    while reads and (line := sys.stdin.buffer.readline()):
        with (Path(sys.argv[1]) / "told").open("ab") as told:
            told.write(line)
    if reads:
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
