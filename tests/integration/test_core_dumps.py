"""What core dumps leave out: memory that holds KV, token ids or the domain's secret has the flag
`dd` among proc(5)'s VmFlags, in the daemon and in its clients."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import kvwarehouse as kvw
from kvwarehouse.daemon.transfer import Staging
from kvwarehouse.gpu.staging_area import HostStagingArea
from kvwarehouse_bench.harness.serving import Serving

_MAPPING = re.compile(r"(?P<begin>[0-9a-f]+)-(?P<end>[0-9a-f]+) \S+ \S+ \S+ \S+ *(?P<path>.*)")
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="f", layout="t/1", page_tokens=4, page_bytes=4096
)


def mappings(pid: int | str) -> Iterator[tuple[range, str, bool]]:
    """(addresses, path, whether a core dump has it) of each."""
    at, path = range(0), ""
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        if found := _MAPPING.fullmatch(line):
            at, path = range(int(found["begin"], 16), int(found["end"], 16)), found["path"]
        elif line.startswith("VmFlags:"):
            yield at, path, "dd" not in line.split()


def dumped(pid: int | str, under: Path) -> dict[str, bool]:
    """Of mappings of files there, by the file's name."""
    found: dict[str, bool] = {}
    for _, path, there in mappings(pid):
        if path.startswith(str(under)):
            name = path.removeprefix(f"{under}/").partition("/")[0].partition(".")[0]
            found[name] = found.get(name, False) or there
    return found


def in_dump(array: np.ndarray) -> bool:
    address = array.ctypes.data + array.nbytes // 2
    return next(there for at, _, there in mappings("self") if address in at)


def test_mappings_of_a_warehouse_are_in_no_core_dump(tmp_path: Path) -> None:
    """Incident: a dump of the daemon had the secret and what clients had stored over gRPC."""
    with Serving(tmp_path, nvme_capacity="64MiB") as serving, serving.connect() as client:
        tokens = list(range(40))
        client.open(SPACE).store(tokens, np.ones((10, SPACE.page_bytes), np.uint8))
        found = [dumped(pid, serving.arena_dir) for pid in (serving.pid, "self")]
        for side in found:
            side.pop("ledger", None)  # LMDB's own mapping
            assert side.keys() >= {"arena", "control", "index", "sessions"}
            assert not any(side.values()), side
        assert "slots" in found[0]


def test_buffers_for_kv_on_its_way_are_in_no_core_dump() -> None:
    assert in_dump(np.ones(1 << 24, np.uint8)), "else this test sees nothing"
    assert not in_dump(HostStagingArea(1 << 20).part(0, 0, 4096))
    for page_bytes in (4096, 8 << 20):
        with Staging(64 << 20).buffer(page_bytes, 4) as buffer:
            assert not in_dump(buffer)
