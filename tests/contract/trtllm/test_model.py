"""The contract model itself: it calls connectors as often, and with what, as TensorRT-LLM's own
test of its connector interface says (tests/integration/defs/llmapi/test_llm_api_connector.py,
without overlap), and it refuses connectors that break the interface's rules."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from trtllm_model.cache import Cache
from trtllm_model.collectives import Collectives
from trtllm_model.executor import Executor, Limits
from trtllm_model.manager import Manager
from trtllm_model.pools import LAYERS, PoolTensor
from trtllm_model.request import Submitted


class Mocked:
    """An executor of one rank over a connector of mocks. answer: of get_num_new_matched_tokens."""

    def __init__(self, answer: tuple[int, bool] = (0, False), **options: Any) -> None:
        self.scheduler, self.worker = MagicMock(), MagicMock()
        self.scheduler.get_num_new_matched_tokens.return_value = answer
        self.scheduler.request_finished.return_value = options.get("saves", False)
        self.scheduler.build_connector_meta.return_value = {}
        self.worker.get_finished.side_effect = options.get("finished", lambda one, two: (one, two))
        manager = Manager(self.worker, self.scheduler, Collectives(0, []), "new", 0)
        cache = Cache(PoolTensor(0, 16, 4), 4, chunked=False)
        cache.check = lambda request, computed: None  # type: ignore[method-assign]  # loads are mocks
        limits = Limits(options.get("chunk_tokens", 1 << 30))
        self.executor = Executor(cache, manager, limits)

    def run(self, tokens: int, new_tokens: int) -> None:
        self.executor.submit(Submitted(1, list(range(tokens)), new_tokens))
        for _ in range(100):
            if not self.executor.requests:
                return
            self.executor.step()
        raise AssertionError("not over")

    @property
    def outputs(self) -> list[Any]:
        return [call.args[0] for call in self.scheduler.build_connector_meta.call_args_list]

    @property
    def polls(self) -> list[Any]:
        return [tuple(call.args) for call in self.worker.get_finished.call_args_list]


def test_model_calls_a_connector_as_often_as_the_engine_does() -> None:
    model = Mocked()
    model.run(tokens=3, new_tokens=8)
    assert model.scheduler.build_connector_meta.call_count == 8
    assert model.worker.start_load_kv.call_count == 8
    assert model.worker.wait_for_save.call_count == 8
    assert model.worker.get_finished.call_count == 8
    assert model.worker.wait_for_layer_load.call_count == 8 * LAYERS
    assert model.worker.save_kv_layer.call_count == 8 * LAYERS
    assert model.scheduler.request_finished.call_count == 1
    assert model.scheduler.update_state_after_alloc.call_count == 1
    assert model.scheduler.get_num_new_matched_tokens.call_count == 1


def test_model_parks_a_request_that_loads_and_hands_it_over_once() -> None:
    model = Mocked((4, True))
    model.run(tokens=9, new_tokens=8)
    assert len(model.polls) == 9
    assert model.polls[0] == ([], [1])
    assert model.outputs[0].new_requests == []
    assert model.outputs[1].new_requests[0].computed_position == 4


def test_model_keeps_the_blocks_of_a_request_that_saves() -> None:
    model = Mocked(saves=True)
    model.run(tokens=3, new_tokens=8)
    assert model.polls[-1] == ([1], [])
    assert all(poll == ([], []) for poll in model.polls[:-1])


def test_model_tells_tokens_and_blocks_of_chunks_once() -> None:
    model = Mocked(chunk_tokens=8)
    model.run(tokens=16, new_tokens=4)
    first, second = model.outputs[0].new_requests[0], model.outputs[1].cached_requests[0]
    assert (len(first.new_tokens), len(first.new_block_ids)) == (16, 4)
    assert (first.num_scheduled_tokens, second.computed_position) == (8, 8)
    assert second.new_tokens == second.new_block_ids == []


def test_model_leaves_what_the_connector_brings_out_of_the_first_position() -> None:
    model = Mocked((4, False))
    model.run(tokens=9, new_tokens=2)
    assert model.outputs[0].new_requests[0].computed_position == 0
    assert model.outputs[0].new_requests[0].num_scheduled_tokens == 5


def test_model_refuses_to_wait_for_a_load_of_nothing() -> None:
    with pytest.raises(RuntimeError, match="load_kv_async"):
        Mocked((0, True)).run(tokens=9, new_tokens=2)


def test_model_refuses_a_prompt_of_which_nothing_is_left_to_compute() -> None:
    with pytest.raises(AssertionError):
        Mocked((9, False)).run(tokens=9, new_tokens=2)


def test_model_refuses_reports_of_what_it_did_not_hand_over() -> None:
    with pytest.raises(KeyError):
        Mocked(finished=lambda one, two: ([99], [])).run(tokens=9, new_tokens=2)


def test_model_sees_a_wrong_byte() -> None:
    memory = PoolTensor(0, 16, 4)
    cache = Cache(memory, 4, chunked=False)
    worker, scheduler = MagicMock(), MagicMock()
    scheduler.get_num_new_matched_tokens.return_value = (0, False)
    scheduler.request_finished.return_value = False
    worker.get_finished.side_effect = lambda one, two: (one, two)
    manager = Manager(worker, scheduler, Collectives(0, []), "new", 0)
    executor = Executor(cache, manager, Limits())
    executor.submit(Submitted(1, list(range(9)), 3))
    executor.step()
    slot = cache.tables[1][0][1]
    memory.pools[0].views[0][0][slot, 1, 0, 1, 2, 5] ^= 1
    with pytest.raises(AssertionError, match="wrong KV in group 0 at token 6 of 9"):
        executor.step()
