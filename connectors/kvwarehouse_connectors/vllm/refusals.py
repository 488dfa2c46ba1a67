"""What vLLM's configuration alone says against serving an engine. It is asked as early as vLLM lets
us, so that no model is loaded for nothing; the caches and the weights are looked at when they are
there.

Stateless. Imports vLLM.
"""

from __future__ import annotations

from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm.cache_layout import unsupported
from kvwarehouse_connectors.vllm.identity import check_weights_named
from kvwarehouse_connectors.vllm.settings import Settings, read_settings


def checked_settings(vllm_config: Any) -> Settings:
    """The connector's settings. Raises UsageError where one is bad, where kv_load_failure_policy
    is not "recompute", and where an engine of this configuration cannot be served."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        raise kvw.UsageError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a block that does"
            " not come would fail its request. Start the engine with"
            ' "kv_load_failure_policy": "recompute" in --kv-transfer-config',
            code="bad_setting",
        )
    settings = read_settings(transfer.kv_connector_extra_config, str(transfer.kv_role))
    problem = compat.engine_problem(vllm_config)
    if problem:
        raise unsupported("this engine", problem)
    check_weights_named(vllm_config, settings)
    return settings
