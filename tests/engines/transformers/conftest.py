"""A tiny model, and a warehouse in this process's memory behind the real client surface."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import pytest

from kvwarehouse import (
    FlushResult,
    Loaded,
    Match,
    Namespace,
    OpenNamespace,
    StoreResult,
    TransportError,
)
from kvwarehouse.client.requests import LoadRequest, LookupRequest, StoreRequest
from testkit.tiny_llama import tiny_llama


class MemoryWarehouse:
    """Stands in for a kvw.Client: a contract model. Arguments are checked by the real
    OpenNamespace; only the transport is a dictionary. `broken` calls raise; `most` cuts loads
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
        return OpenNamespace(space, self, self, reopen=False)

    def flush(self) -> FlushResult:
        return FlushResult(len(self.pages), 0, 0)

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def has_namespace(self, space: Namespace) -> bool:
        return True

    def lookup(self, request: LookupRequest) -> Match:
        self._call("lookup")
        found = cold = 0
        while found < request.prefix.pages and self._key(request, found) in self.pages:
            cold += self._key(request, found) in self.cold
            found += 1
        return request.match(0, found - cold, cold, 0)

    def load(self, request: LoadRequest) -> Loaded:
        wanted = request.out.count
        for row in range(wanted):
            key = self._key(request, request.first + row)
            page = self.pages.get(key)
            if page is None or row == self.most:
                return Loaded(row, {"absent": wanted - row})
            request.out.write(row, memoryview(page))
            self.cold.discard(key)
            # After some bytes were written: what follows them must not be believed.
            self._call("load")
        return Loaded(wanted)

    def store(self, request: StoreRequest) -> StoreResult:
        self._call("store")
        self.stores += 1
        stored, given = 0, request.pages.count
        for row in range(given):
            key = self._key(request, request.first + row)
            if key not in self.pages:
                self.pages[key] = bytes(request.pages.read(row))
                stored += 1
        return StoreResult(stored, given - stored, {})

    def _key(
        self, request: LookupRequest | LoadRequest | StoreRequest, page: int
    ) -> tuple[bytes, bytes]:
        end = (page + 1) * request.space.page_tokens
        return request.space.id, np.ascontiguousarray(request.prefix.tokens[:end]).tobytes()

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
