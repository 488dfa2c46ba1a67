"""What a user passes as --l2-adapter."""

from __future__ import annotations

import json
from typing import Any

from kvwarehouse_bench.harness.eventually import DEADLINE_S


def l2_adapter(address: str, **settings: Any) -> str:
    """settings: the connector's, without their prefix; "weights" unless they are told otherwise,
    and bounds that no healthy machine reaches."""
    bounds = {"load_timeout_s": DEADLINE_S, "store_timeout_s": DEADLINE_S}
    given = {"address": address, "weights": "w", **bounds, **settings}
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "kvwarehouse_connectors.lmcache",
            "class_name": "WarehouseL2Adapter",
            "adapter_params": {f"kvwarehouse.{name}": value for name, value in given.items()},
        }
    )
