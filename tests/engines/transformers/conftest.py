"""A tiny model, and a warehouse in this process's memory behind the real client surface."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import pytest

from kvwarehouse import FlushResult, Namespace, OpenNamespace, TransportError
from kvwarehouse.client.ends import Ends
from kvwarehouse.client.moves import Moves
from kvwarehouse.client.prompt import Prefix, Window
from kvwarehouse.client.regions import Regions
from testkit.tiny_llama import tiny_llama


class MemoryWarehouse:
    """Stands in for a kvw.Client: a contract model. Arguments are checked by the real
    OpenNamespace; only the data path is a dictionary. `broken` calls raise; `most` cuts loads
    short, as evictions do."""

    def __init__(self) -> None:
        self.pages: dict[tuple[bytes, bytes], bytes] = {}
        self.broken: set[str] = set()
        self.cold: set[tuple[bytes, bytes]] = set()
        """Pages on NVMe only, until a load brings them into DRAM."""
        self.most: int | None = None
        self.stores = 0

    def open(self, space: Namespace) -> OpenNamespace:
        self._call("open")
        return OpenNamespace(Moves(space, Ends(self, self), reopen=False))

    def flush(self) -> FlushResult:
        return FlushResult(len(self.pages), 0, 0)

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def opened(self, space: Namespace) -> bool:
        return True

    def lookup(self, space: Namespace, prefix: Prefix) -> tuple[int, int, int]:
        self._call("lookup")
        found = cold = 0
        while found < prefix.pages and self._key(space, prefix, found) in self.pages:
            cold += self._key(space, prefix, found) in self.cold
            found += 1
        return 0, found - cold, cold

    def load(
        self, space: Namespace, prefix: Prefix, window: Window, out: Regions, timeout_s: float
    ) -> tuple[int, dict[str, int]]:
        for row in range(window.pages):
            page = self.pages.get(self._key(space, prefix, window.first + row))
            if page is None or row == self.most:
                return row, {"absent": window.pages - row}
            out.write(row, memoryview(page))
            self.cold.discard(self._key(space, prefix, window.first + row))
            # After some bytes were written: what follows them must not be believed.
            self._call("load")
        return window.pages, {}

    def store(
        self, space: Namespace, prefix: Prefix, window: Window, pages: Regions, timeout_s: float
    ) -> tuple[int, int, dict[str, int]]:
        self._call("store")
        self.stores += 1
        stored = 0
        for row in range(window.pages):
            key = self._key(space, prefix, window.first + row)
            if key not in self.pages:
                self.pages[key] = bytes(pages.read(row))
                stored += 1
        return stored, window.pages - stored, {}

    def _key(self, space: Namespace, prefix: Prefix, page: int) -> tuple[bytes, bytes]:
        end = (page + 1) * space.page_tokens
        return space.id, np.ascontiguousarray(prefix.tokens[:end]).tobytes()

    def _call(self, name: str) -> None:
        if name in self.broken:
            raise TransportError(f"{name}: no daemon", code="no_daemon")


@pytest.fixture(scope="session")
def torch() -> Any:
    found = pytest.importorskip("torch", reason="needs torch: make test-engines installs it")
    # For matrices this small a second thread costs more than it brings, most of all beside others.
    found.set_num_threads(1)
    return found


@pytest.fixture(scope="session")
def transformers(torch: Any) -> Any:
    return pytest.importorskip(
        "transformers", reason="needs transformers: make test-engines installs it"
    )


@pytest.fixture(scope="session")
def model(torch: Any, transformers: Any) -> Any:
    return tiny_llama(torch, transformers)


@pytest.fixture
def prompt(torch: Any) -> Any:
    """150 ids, [1, 150]: 4 full chunks of 32 and a part, or 9 pages of 16 and a part."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 512, (1, 150), generator=generator)


@pytest.fixture
def warehouse() -> MemoryWarehouse:
    return MemoryWarehouse()
