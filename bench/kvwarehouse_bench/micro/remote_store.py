"""The store that a remote tier is measured over, and obstore alone on it: a folder in memory, or
one of the user's, from which all that the bench put is removed again.

All objects, obstore's own too, are below the names of a fleet that is made for one run. Not
thread-safe; the threads of `ObstoreAlone` are its own.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from kvwarehouse import remote_file
from kvwarehouse.errors import TransportError, WarehouseError
from kvwarehouse.fleet import FleetSecret
from kvwarehouse.remote.names import FleetNames
from kvwarehouse.remote.object_store import (
    ObjectStore,
    StoredObject,
    StoreSettings,
    open_store,
    require_obstore,
)
from kvwarehouse.remote_file import RemoteFile
from kvwarehouse_bench.harness.alternation import timed
from kvwarehouse_bench.micro.options import Options, noise

_SECRET_BYTES = 32
_SHARED_MEMORY = "/dev/shm"
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class BenchStore:
    """`url` and `config_path` as serve takes them; `config`: what the file says."""

    url: str
    config_path: str
    config: RemoteFile
    secret_path: Path
    secret: FleetSecret
    store: ObjectStore

    @property
    def names(self) -> FleetNames:
        return FleetNames(self.secret.fleet_id)

    @property
    def settings(self) -> dict[str, Any]:
        """Of a daemon that is of its fleet."""
        more = {"remote_config": self.config_path} if self.config_path else {}
        return {"remote": self.url, "fleet_secret": str(self.secret_path), **more}

    def objects(self, namespace: bytes) -> list[StoredObject]:
        """Of pages, as the store lists them."""
        return list(self.store.list(self.names.pages_prefix(namespace)))

    def remove(self, objects: Sequence[StoredObject]) -> None:
        self.store.delete([each.name for each in objects])


@contextmanager
def bench_store(options: Options, room_bytes: int) -> Iterator[BenchStore]:
    """The user's store, or a folder with that much room. Every daemon of its fleet has to have
    ended before the block does. Raises UsageError for a store that cannot be."""
    require_obstore()
    with tempfile.TemporaryDirectory(prefix="kvw-bench-", dir=_memory(room_bytes)) as scratch:
        url = options.remote
        if not url:
            folder = Path(scratch, "store")
            folder.mkdir()
            url = f"file://{folder}"
        config = remote_file.read(options.remote_config)
        secret_path, data = Path(scratch, "fleet-secret"), secrets.token_bytes(_SECRET_BYTES)
        secret_path.touch(0o600)
        secret_path.write_bytes(data)
        store = open_store(StoreSettings.of(url, config))
        made = BenchStore(
            url, options.remote_config, config, secret_path, FleetSecret.derive(data), store
        )
        try:
            yield made
        finally:
            if options.remote:
                _say(_emptied(made))


def _emptied(made: BenchStore) -> str:
    """Removes all that the run has put; what it leaves, and why, or nothing."""
    root, where = made.names.root, made.url.partition("?")[0].rstrip("/")
    why, left = "", 0
    try:
        # Not the one of the run: a store that failed then is not asked for a while.
        store = open_store(StoreSettings.of(made.url, made.config))
        store.delete([each.name for each in store.list(root)])
        left = sum(1 for _ in store.list(root))
    except TransportError as error:
        why = f" ({error.message})"
    parts = urlsplit(made.url)
    if parts.scheme == "file":  # a put that was cut off leaves what no listing has
        whole = Path(unquote(parts.path), root)
        shutil.rmtree(whole, ignore_errors=True)
        if not whole.exists():
            return ""
    if not left and not why:
        return ""
    count = f"{left:,} objects are" if left else "what it has put may be"
    return f"bench remote: {count} left below {where}/{root}{why}; remove that prefix"


def _say(text: str) -> None:
    if text:
        print(text, file=sys.stderr)


def _memory(room_bytes: int) -> str:
    """tmpfs, where there is one with that much room, so that the store is not the limit."""
    wanted = room_bytes + _SPARE_BYTES
    if os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free >= wanted:
        return _SHARED_MEMORY
    return tempfile.gettempdir()


class ObstoreAlone:
    """What the tier's client of stores does for it, with as many calls at a time and nothing else:
    no daemon, no digest, no copy to where an engine would have the pages."""

    def __init__(self, made: BenchStore, sizes: Sequence[int]) -> None:
        """`sizes`: bytes of each object that it puts."""
        self._store, self._config = made.store, made.config
        self._sizes = list(sizes)
        root = f"{made.names.root}bench/"
        # In as many folders, where a store has any, as the tier puts pages of a day into.
        self._names = [f"{root}{at % 256:02x}/{at}" for at in range(len(sizes))]
        body: Any = noise(1, max(sizes)).reshape(-1)
        self._body = memoryview(body)
        self._threads = ExitStack()
        self._gets, self._puts = (
            self._threads.enter_context(ThreadPoolExecutor(count)) for count in self.at_a_time
        )

    @property
    def at_a_time(self) -> tuple[int, int]:
        """Gets, puts."""
        return self._config.gets, self._config.puts

    def get(self, objects: Sequence[StoredObject]) -> float:
        """Seconds until all of them were read."""
        return timed(lambda: list(self._gets.map(self._get, objects)))

    def put(self) -> float:
        """Seconds until the store has acknowledged all of them. They are gone afterwards."""

        def put(at: int) -> None:
            self._store.put(self._names[at], self._body[: self._sizes[at]])

        taken = timed(lambda: list(self._puts.map(put, range(len(self._names)))))
        self._store.delete(self._names)
        return taken

    def _get(self, one: StoredObject) -> None:
        body = self._store.get(one.name, 0, one.size_bytes)
        if body is None or len(body) != one.size_bytes:
            raise WarehouseError(f"the store has lost {one.name} meanwhile", code="bench")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.close()
