"""Files of the arena cut short under a running daemon: whatever reads or writes what is gone is
given a miss or an error, no process ends by a signal, and the daemon says why it ends.

Incident: one `truncate` of the arena's file ended the daemon and every engine by SIGBUS.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.harness.serving import RefusedError, Serving
from testkit import tally

SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=6000
)
PAGES = np.random.default_rng(1).integers(256, size=(64, 6000), dtype=np.uint8)

# An engine: stores, says so, and goes on when its standard input ends. Prints what came of it.
ENGINE = """
import sys
import numpy as np
import kvwarehouse as kvw

space = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=6000
)
client = kvw.connect(sys.argv[1], timeout_s=30)
opened = client.open(space)
pages = np.random.default_rng(1).integers(256, size=(64, 6000), dtype=np.uint8)
opened.store(list(range(64)), pages)
print("stored", flush=True)
sys.stdin.read()
out = np.zeros_like(pages)
for call in (
    lambda: opened.lookup(list(range(64))),
    lambda: opened.load(list(range(64)), out),
    lambda: opened.store(list(range(100, 164)), pages),
    lambda: opened.pin(list(range(64))),
    lambda: client.check(),
):
    try:
        print(call())
    except kvw.WarehouseError as error:
        print(error.code)
try:
    loaded = int(opened.load(list(range(64)), out))
except kvw.WarehouseError:
    loaded = 0
assert (out[:loaded] == pages[:loaded]).all()
print("went on")
"""


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="8MiB") as serving:
        yield serving


def check_advice(serving: Serving, text: str, *, refused: bool) -> None:
    """Does what `text` says, after which the daemon serves, with all pages where the start is not
    `refused` without it."""
    assert ("move that directory away" in text) == refused
    if refused:
        with pytest.raises(RefusedError):
            serving.start()
        serving.arena_dir.rename(serving.arena_dir.with_name("moved"))
    serving.start()
    out = np.zeros((64, 6000), np.uint8)
    with serving.connect() as client:
        loaded = int(client.open(SPACE).load(list(range(64)), out))
    assert loaded == (0 if refused else 64)
    assert (out[:loaded] == PAGES[:loaded]).all()


@pytest.mark.parametrize("left", [0.0, 0.05])
@pytest.mark.parametrize("name", ["arena", "slots", "index.*", "control"])
def test_cut_file_ends_the_daemon_with_its_name_and_no_engine(
    serving: Serving, name: str, left: float
) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-P", "-c", ENGINE, serving.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert engine.stdout is not None
    assert engine.stdout.readline() == "stored\n"
    path = next(serving.arena_dir.glob(name))
    os.truncate(path, int(left * path.stat().st_size))
    said, _ = engine.communicate("", timeout=DEADLINE_S)
    assert engine.returncode == 0
    lookup, load, store, _pin, _check, went_on = said.splitlines()
    assert went_on == "went on"
    # Neither is an error, whether the daemon is still there or has ended.
    assert lookup.startswith("Match(")
    assert load.startswith("Loaded(")
    # Incident: zeros of a cut file were taken for another version's format.
    assert store != "bad_files"
    if name == "control" and not left:
        assert lookup.startswith("Match(pages=0,")
        assert load.startswith("Loaded(0,")
    eventually(lambda: serving.events("ended"), "the daemon ends")
    (ended,) = serving.events("ended")
    assert ended["code"] == "memory_lost"
    assert f"file {name.rstrip('.*')} " in ended["text"]
    assert serving.ended() == 1
    check_advice(serving, ended["text"], refused=name in ("arena", "slots"))
    tally.count("file of the arena cut under a running daemon")
