"""What a user passes as --l2-adapter."""

from __future__ import annotations

import json
from typing import Any


def l2_adapter(address: str, **settings: Any) -> str:
    """settings: the connector's, without their prefix; "weights" unless they are told otherwise."""
    given = {"address": address, "weights": "w", **settings}
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "kvwarehouse_connectors.lmcache",
            "class_name": "WarehouseL2Adapter",
            "adapter_params": {f"kvwarehouse.{name}": value for name, value in given.items()},
        }
    )
