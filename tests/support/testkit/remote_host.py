"""A daemon with a folder as its remote tier, and prompts of whole objects: what tests of the tier
from its outside have in common. Hosts share the folder where they are of one `tmp_path`."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvwarehouse as kvw
from kvwarehouse.fleet import FleetSecret
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse_bench.harness.eventually import eventually
from testkit.fleet_secrets import secret_file
from testkit.quick_remote import QuickServing

SECRET = FleetSecret.derive(bytes(32))
NAMES = FleetNames(SECRET.fleet_id)
PAGE_TOKENS, PAGE_BYTES = 16, 4096
RUN_PAGES = 256 // PAGE_TOKENS  # one object
RECORD_BYTES = 4096 + PAGE_BYTES
LOAD_S = 60.0
"""Of a load or a store that is to succeed: a machine may be slow."""
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="f", layout="t/1", page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES
)


class TakenFolder:
    """Takes a folder from daemons that go on using it, as when its mount is gone, and gives it
    back. A file is at its path meanwhile, in which nothing can be put. What was under way at that
    moment may have made the folder anew: it is taken away too, as it would lie below a mount."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept, self._file = (
            folder.with_name(f"{folder.name}.{by}") for by in ("kept", "gone")
        )

    def take(self) -> None:
        self._folder.rename(self._kept)
        self._file.write_bytes(b"a file in the place of a folder")
        self._put_there(self._file)

    def give_back(self) -> None:
        self._put_there(self._kept)

    def _put_there(self, what: Path) -> None:
        def is_there() -> bool:
            if self._folder.is_dir():
                shutil.rmtree(self._folder, ignore_errors=True)
            else:
                self._folder.unlink(missing_ok=True)
            try:
                what.rename(self._folder)
            except OSError:  # made anew in between
                return False
            return True

        eventually(is_there, f"{what} is at {self._folder}")


class RemoteHost:
    """`settings`: flags of serve, over those that make it a host of the fleet in `tmp_path`."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.folder = tmp_path / "shared"
        self.folder.mkdir(exist_ok=True)
        usual = {"remote": f"file://{self.folder}", "remote_capacity": "1GiB"}
        secret = secret_file(tmp_path)
        self.serving = QuickServing(tmp_path, fleet_secret=secret, **{**usual, **settings})
        self.client: Any = None

    def start(self) -> None:
        self.serving.start()
        self.client = self.serving.connect(timeout_s=LOAD_S)

    def stop(self) -> int:
        self.client.close()
        return self.serving.stop()

    def remove(self) -> None:
        if self.client is not None:
            self.client.close()
        self.serving.remove()

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.client.status()["remote"])

    def until(self, so: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        def ask() -> dict[str, Any] | None:
            status = self.status
            return status if so(status) else None

        return eventually(ask, what)

    def until_state(self, state: str) -> dict[str, Any]:
        return self.until(lambda status: status["state"] == state, f"the tier is {state}")

    def store(self, *prompts: int, runs: int = 1) -> None:
        space = self.client.open(SPACE)
        for prompt in prompts:
            stored = space.store(tokens(prompt, runs), pages(prompt, runs), timeout_s=LOAD_S)
            assert stored.stored == runs * RUN_PAGES

    def put(self, *prompts: int, runs: int = 1) -> None:
        """Stores prompts, and waits until the remote tier has their objects."""
        before = self.status["puts"].get("stored", 0)
        self.store(*prompts, runs=runs)
        wanted = before + runs * len(prompts)
        self.until(lambda status: status["puts"].get("stored", 0) == wanted, "all were put")

    def empty(self) -> None:
        """Until none of its own tiers has a page any more."""
        self.client.open(SPACE)
        eventually(lambda: self.client.evict(None, 100_000, "all") == 0, "its tiers are empty")

    def until_remote(self, prompt: int, runs: int = 1) -> None:
        wanted = {"remote": runs * RUN_PAGES}
        eventually(lambda: self.found(prompt, runs) == wanted, f"{prompt} is found in the store")

    def use(self, *prompts: int) -> None:
        for prompt in prompts:
            assert self.load(prompt) == RUN_PAGES

    def load(self, prompt: int, runs: int = 1, **how: Any) -> Any:
        """What load() said; what it gave is what was stored."""
        out = np.zeros((runs * RUN_PAGES, PAGE_BYTES), np.uint8)
        how = {"timeout_s": LOAD_S, **how}
        loaded = self.client.open(SPACE).load(tokens(prompt, runs), out, **how)
        assert np.array_equal(out[:loaded], pages(prompt, runs)[:loaded])
        return loaded

    def found(self, prompt: int, runs: int = 1) -> dict[str, int]:
        """Where lookup() finds pages, by tier, without those that have none."""
        by_tier = self.client.open(SPACE).lookup(tokens(prompt, runs)).by_tier
        return {tier: count for tier, count in by_tier.items() if count}

    def objects(self) -> dict[PagesName, bytes]:
        return {name: path.read_bytes() for name, path in self.paths().items()}

    def paths(self) -> dict[PagesName, Path]:
        return object_paths(self.folder, NAMES)

    def worker(self) -> int:
        """The last one's pid."""
        return int(self.serving.events("remote_worker_started")[-1]["pid"])

    def pause_worker(self) -> int:
        """Its pid, when all of its threads stand: on a busy machine they go on behind the signal,
        and may end what was begun behind it."""
        pid = self.worker()
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: _stands(pid), "the worker stands")
        return pid


def _stands(pid: int) -> bool:
    try:
        states = {
            (thread / "stat").read_text().rpartition(")")[2].split()[0]
            for thread in Path(f"/proc/{pid}/task").iterdir()
        }
    except OSError:  # one of them ended
        return False
    return states == {"T"}


def names_in(folder: Path) -> list[str]:
    """Of all that a store in a folder has, while workers write and delete there."""
    # Path.rglob() raises where a folder goes meanwhile.
    return [
        os.path.relpath(os.path.join(place, name), folder)
        for place, _, names in os.walk(folder)
        for name in names
    ]


def object_paths(folder: Path, fleet: FleetNames) -> dict[PagesName, Path]:
    return {of: folder / name for name in names_in(folder) if (of := fleet.pages_of(name))}


def tokens(prompt: int, runs: int = 1) -> list[int]:
    return list(range(100_000 * prompt, 100_000 * prompt + runs * 256))


def pages(prompt: int, runs: int = 1) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Of a longer prompt the first are the same."""
    random = np.random.default_rng(prompt)
    return random.integers(0, 255, (runs * RUN_PAGES, PAGE_BYTES), np.uint8)
