"""The steps of probe.py for vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

CONNECTOR = "WarehouseConnector"


def _engine() -> dict[str, Any]:
    version = str(import_module("vllm").__version__)
    import_module("vllm.config")
    return {"version": version}


def _device() -> dict[str, Any]:
    platform = import_module("vllm.platforms").current_platform
    found = {"device": str(platform.device_type)}
    with suppress(Exception):  # not every platform has one; it is only shown
        found["device_name"] = str(platform.get_device_name())
    return found


def _plugin() -> dict[str, Any]:
    import_module("vllm.plugins").load_general_plugins()
    return {"registered": CONNECTOR in _factory()._registry}


def _connector() -> dict[str, Any]:
    connector = import_module("kvwarehouse_connectors.vllm.connector").WarehouseConnector
    missing = sorted(getattr(connector, "__abstractmethods__", ()))
    if missing:
        return {"connector_error": f"vLLM asks for hooks it does not have: {', '.join(missing)}"}
    return {"connector_error": ""}


def _hashes() -> dict[str, Any]:
    config = import_module("vllm.config").CacheConfig
    return {"hash_algorithm": str(config().prefix_caching_hash_algo)}


def _factory() -> Any:
    return import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory


def read_command(arguments: Sequence[str]) -> dict[str, Any]:
    """What vLLM and the connector make of arguments of `vllm serve`; makes no engine. May fetch a
    model's configuration, as vLLM does. Raises whatever they refuse them with."""
    args_of = import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser(exit_on_error=False)
    parser.error = _raise
    args = args_of(parser).parse_args(list(arguments))
    args.model = args.model_tag or args.model
    engine_args = import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config()
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return {"command_error": "its --kv-transfer-config names another connector, or none"}
    import_module("kvwarehouse_connectors.vllm.refusals").checked_settings(config)
    return {
        "command_block_tokens": int(config.cache_config.block_size or 0),
        "command_step_tokens": int(config.scheduler_config.max_num_batched_tokens),
        "command_tp": int(config.parallel_config.tensor_parallel_size),
        "command_pp": int(config.parallel_config.pipeline_parallel_size),
    }


def _raise(message: str) -> None:
    raise ValueError(message)


STEPS = (_engine, _device, _plugin, _connector, _hashes)
