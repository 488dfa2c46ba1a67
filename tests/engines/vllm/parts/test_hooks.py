"""Nothing of the warehouse is raised into a running engine, whatever goes wrong behind a hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
)

import kvwarehouse as kvw
from kvwarehouse_connectors.vllm.connector import WarehouseConnector
from kvwarehouse_connectors.vllm.messages import StepMetadata, StepResults
from vllm_parts.requests import request

AT_THE_START = {
    "__init__",
    "register_kv_caches",
    "set_xfer_handshake_metadata_pp_aware",
    "get_handshake_metadata",
    "get_required_kvcache_layout",
}
"""These may refuse an engine that cannot be served."""

NOT_HOOKS = {
    "scheduler_side",
    "worker_side",
    "requires_kv_delivery",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "supports_sleep_mode",
}


class Broken:
    """A half of the connector in which everything fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*args: Any, **options: Any) -> Any:
            raise self._error

        return fail


def connector(error: Exception, *, worker: bool = False) -> WarehouseConnector:
    made = object.__new__(WarehouseConnector)
    made._scheduler = None if worker else Broken(error)  # type: ignore[assignment]
    made._worker = Broken(error) if worker else None  # type: ignore[assignment]
    made._connector_metadata = StepMetadata()
    return made


BLOCKS = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],))
ASKED = request(list(range(40)))
CALLS: dict[str, tuple[tuple[Any, ...], Any]] = {
    # hook: (arguments, what it answers instead)
    "bind_kv_cache_manager": ((SimpleNamespace(block_pool=None),), None),
    "on_new_request": ((ASKED,), None),
    "get_num_new_matched_tokens": ((ASKED, 0), (0, False)),
    "get_external_cache_hit_sources": ((ASKED, 16), {}),
    "build_connector_meta": ((SimpleNamespace(),), StepMetadata()),
    "update_connector_output": (
        (SimpleNamespace(kv_connector_worker_meta=StepResults(), finished_recving={"r"}),),
        None,
    ),
    "request_finished": ((ASKED, []), (False, None)),
    "request_finished_all_groups": ((ASKED, ([],)), (False, None)),
    "take_events": ((), []),
    "has_pending_push_work": ((), False),
    "reset_cache": ((), False),
    "start_load_kv": ((None,), None),
    "get_transfer_results": ((set(),), KVConnectorTransferResults()),
    "get_block_ids_with_load_errors": ((), set()),
    "wait_for_layer_load": (("layer",), None),
    "save_kv_layer": (("layer", None, None), None),
    "wait_for_save": ((), None),
    "build_connector_worker_meta": ((), None),
    "get_kv_connector_stats": ((), None),
    "shutdown": ((), None),
}
# The engine waits for a load that it asked for here: tested by itself.
TELLING = {"update_state_after_alloc"}
ERRORS = [RuntimeError("odd"), kvw.TransportError("gone", code="no_daemon"), KeyError("x")]


def test_every_hook_is_among_the_tests() -> None:
    own = {
        name
        for name, value in vars(WarehouseConnector).items()
        if not name.startswith("_") and (inspect.isroutine(value) or isinstance(value, property))
    }
    assert own - AT_THE_START - NOT_HOOKS == set(CALLS) | TELLING
    assert own - {"scheduler_side", "worker_side"} <= set(dir(KVConnectorBase_V1)) | {
        "request_finished_all_groups",
        "supports_sleep_mode",  # of vLLM 0.33
    }


def test_connector_does_not_promise_to_let_go_of_memory_in_sleep() -> None:
    assert WarehouseConnector.supports_sleep_mode() is False
    assert WarehouseConnector.supports_sleep_mode(object()) is False


def test_every_hook_that_vllm_requires_is_there() -> None:
    assert not WarehouseConnector.__abstractmethods__


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("worker", [False, True], ids=["scheduler", "worker"])
def test_hook_whose_half_fails_answers_that_there_is_nothing(
    name: str, error: Exception, worker: bool
) -> None:
    arguments, answer = CALLS[name]
    assert getattr(connector(error, worker=worker), name)(*arguments) == answer


def test_hook_that_failed_says_so(caplog: pytest.LogCaptureFixture) -> None:
    connector(RuntimeError("odd")).get_num_new_matched_tokens(ASKED, 0)
    assert "get_num_new_matched_tokens failed; the engine goes on" in caplog.text
    assert "odd" in caplog.text


class Refusing(Broken):
    """Fails, but for the refusal of a load, which it remembers."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.refused: list[tuple[Any, ...]] = []

    def refuse(self, *arguments: Any) -> None:
        self.refused.append(arguments)


@pytest.mark.parametrize("tokens", [0, 32])
def test_load_that_cannot_be_ordered_is_refused_for_the_engine_waits_for_it(tokens: int) -> None:
    made = connector(RuntimeError("odd"))
    made._scheduler = half = Refusing(RuntimeError("odd"))  # type: ignore[assignment]
    made.update_state_after_alloc(ASKED, BLOCKS, tokens)
    assert half.refused == ([(ASKED,)] if tokens else [])


def test_failure_to_read_the_blocks_of_a_load_is_not_raised_either() -> None:
    def unreadable() -> Any:
        raise RuntimeError("odd")

    made = connector(RuntimeError("odd"))
    made._scheduler = half = Refusing(RuntimeError("odd"))  # type: ignore[assignment]
    made.update_state_after_alloc(ASKED, SimpleNamespace(get_block_ids=unreadable), 32)
    assert len(half.refused) == 1


def test_orders_of_another_connector_are_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    made = connector(RuntimeError("odd"), worker=True)
    made._connector_metadata = object()
    made.start_load_kv(None)
    assert "metadata is object" in caplog.text


def test_preempted_requests_need_not_be_recomputed_for_a_cache() -> None:
    assert connector(RuntimeError("odd")).requires_kv_delivery is False
