"""The SGLang connector without SGLang: on a model of its host pools, over a real daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvwarehouse_connectors.core.daemon_connection import DaemonConnection
from kvwarehouse_connectors.sglang.counts import Counts
from kvwarehouse_connectors.sglang.engine_info import EngineInfo, PoolInfo, RankInfo
from kvwarehouse_connectors.sglang.identity import Identity
from kvwarehouse_connectors.sglang.pools import WarehousePool
from kvwarehouse_connectors.sglang.settings import Settings
from testkit.host_pools import ModelPool

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

Attach = Callable[..., WarehousePool]


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def attach(counts: Counts, request: pytest.FixtureRequest, patient: None) -> Iterator[Attach]:
    """attach(pool, address, ranks=..., salt=...): a rank's pool, attached. The bounds of its calls
    are far off: a test that ends by one says so."""
    opened: list[DaemonConnection] = []

    def attached(
        pool: ModelPool,
        address: str,
        *,
        ranks: RankInfo | None = None,
        weights: str = "w",
        **settings: Any,
    ) -> WarehousePool:
        given = {"load_timeout_s": 120.0, "store_timeout_s": 120.0}
        chosen = Settings(address=address, **{**given, **settings})
        connection = DaemonConnection(address)
        opened.append(connection)
        identity = Identity(
            EngineInfo("0.5.23", model="m"),
            ranks or RankInfo(latent=pool.latent),
            weights,
            "",
            settings.get("salt", request.node.nodeid),
        )
        return WarehousePool(pool, pool_info(pool), identity, connection, counts, chosen)

    yield attached
    for connection in opened:
        connection.close()


def pool_info(pool: ModelPool, name: str = "kv") -> PoolInfo:
    return PoolInfo(
        name=name,
        kind="mla" if pool.latent else "mha",
        type_name=type(pool).__name__,
        layout=pool.layout,
        page_tokens=pool.page_size,
        dtype=pool.dtype,
        shape={"layers": str(pool.layer_num), "head_dim": str(pool.head_dim)},
        heads=0 if pool.latent else pool.head_num,
    )
