"""The connector with a switch: steps in random turns without it, without it again, and with it.

Imported in the engine's processes, by name; one object in the scheduler's, one in each worker's.
Engines differ from run to run by more than a connector costs, so the arms alternate inside one.
A request's kv_transfer_params say what to do:

  {"bench.phase": "any", "bench.steps": 12}  arms in turns, each for so many steps
  {"bench.phase": "timers any"}              always with it, each hook timed
  {"bench.report": "/path"}                  writes what was seen to /path.scheduler, /path.worker

"Without" leaves out every hook of a step, both in the scheduler and in the worker. What remains in
all arms: noting that a request came and went, and the message to the worker, which is then empty.
"""

from __future__ import annotations

import json
import random
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvwarehouse_bench.vllm.arms import ARMS, ON, Step
from kvwarehouse_connectors.vllm.connector import WarehouseConnector
from kvwarehouse_connectors.vllm.messages import StepMetadata

SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "take_events",
    "has_pending_push_work",
    "request_finished_all_groups",
)
WORKER_HOOKS = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


@dataclass
class ArmedMetadata(StepMetadata):
    arm: str = ON
    timed: bool = False
    report: str = ""


class Timers:
    """Nanoseconds of each call of hooks, while they are wrapped; of at most so many."""

    _MOST_CALLS = 200_000

    def __init__(self, owner: Any, hooks: Iterable[str]) -> None:
        self._owner = owner
        self._hooks = tuple(hooks)
        self.seen: dict[str, array[int]] = {}

    def switch(self, on: bool) -> None:
        """On: from 0."""
        if on == bool(self.seen):
            return
        if not on:
            for name in self._hooks:
                delattr(self._owner, name)
            self.seen = {}
            return
        self.seen = {name: array("q") for name in self._hooks}
        for name in self._hooks:
            setattr(self._owner, name, self._timed(getattr(self._owner, name), self.seen[name]))

    def _timed(self, hook: Callable[..., Any], seen: array[int]) -> Callable[..., Any]:
        clock = time.perf_counter_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = clock()
            try:
                return hook(*args, **kwargs)
            finally:
                if len(seen) < self._MOST_CALLS:
                    seen.append(clock() - begin)

        return timed


class Turns:
    """Which arm is next, and how long each step took, from one step's begin to the next one's."""

    def __init__(self) -> None:
        self._numbers = random.Random(1)
        self._steps_each = 0
        self._left = 0
        self._arms: list[str] = []
        self.arm = ON
        self._turn = -1
        self._last: tuple[int, int, str] | None = None
        self.log: list[Step] = []

    def begin(self, steps_each: int) -> None:
        """steps_each: 0 for always on."""
        self._steps_each, self._left = steps_each, 0
        self.arm, self._turn, self._last = ON, -1, None
        self._arms, self.log = [], []

    def step(self, tokens: int) -> str:
        """A step of so many tokens begins. Returns its arm; `arm` is then the next step's. One of
        none, as the engine makes between others, belongs to the step before it."""
        if not tokens and self._last is not None:
            return self._last[2]
        now = time.perf_counter_ns()
        if self._last is not None:
            begun, its_tokens, its_arm = self._last
            self.log.append((self._turn, its_arm, its_tokens, now - begun))
        arm = self.arm
        self._last = (now, tokens, arm)
        if self._steps_each:
            self._advance()
        return arm

    def _advance(self) -> None:
        if self._left == 0:
            if not self._arms:
                self._arms = self._numbers.sample(ARMS, k=len(ARMS))
            self.arm = self._arms.pop()
            self._left = self._steps_each
            self._turn += 1
        self._left -= 1


class Toggled(WarehouseConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._turns = Turns()
        self._phase: tuple[str, int] = ("", 0)
        self._arm = ON
        self._report = ""
        hooks = SCHEDULER_HOOKS if self._scheduler is not None else WORKER_HOOKS
        self._timers = Timers(self, hooks)

    # -- the scheduler's hooks: `_turns.arm` until a step is built, `_arm` after it

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        phase = (params.get("bench.phase", ""), params.get("bench.steps", 0))
        if phase != self._phase and phase[0]:
            self._phase = phase
            self._turns.begin(phase[1])
            self._timers.switch(False)
            self._timers.switch(phase[0].startswith("timers"))
        if "bench.report" in params:
            self._report = params["bench.report"]
            self._write(f"{self._report}.scheduler", {"log": self._turns.log})
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._turns.arm != ON:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._turns.arm == ON:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> ArmedMetadata:
        before = self._arm
        self._arm = self._turns.step(scheduler_output.total_num_scheduled_tokens)
        metadata: Any = StepMetadata()
        if self._arm == ON:
            if before != ON:
                self._pass_over()
            metadata = super().build_connector_meta(scheduler_output)
        report, self._report = self._report, ""
        timed = self._phase[0].startswith("timers")
        return ArmedMetadata(**vars(metadata), arm=self._arm, timed=timed, report=report)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._arm == ON:
            super().update_connector_output(connector_output)

    def take_events(self) -> Iterable[Any]:
        return super().take_events() if self._arm == ON else ()

    def _pass_over(self) -> None:
        """What was computed without the connector stays unstored: catching up would put all arms'
        stores into one."""
        side = self.scheduler_side
        for tracked in side._requests.values():
            computed = tracked.request.num_computed_tokens
            tracked.considered = [
                max(seen, computed // group.block_tokens)
                for seen, group in zip(tracked.considered, side._groups, strict=True)
            ]
            tracked.next_tokens = 0

    # -- the worker's hooks

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._timers.switch(connector_metadata.timed)
        self._arm = connector_metadata.arm
        if connector_metadata.report:
            self._write(f"{connector_metadata.report}.worker", {})
            self._timers.switch(False)  # the next phase counts from 0
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._arm == ON:
            super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        if self._arm == ON:
            super().wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if self._arm == ON:
            return super().get_transfer_results(finished_req_ids)
        return KVConnectorTransferResults(finished_recving=set(), failed_recving=set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return super().get_block_ids_with_load_errors() if self._arm == ON else set()

    def build_connector_worker_meta(self) -> Any:
        return super().build_connector_worker_meta() if self._arm == ON else None

    # -- both

    def get_kv_connector_stats(self) -> Any:
        return super().get_kv_connector_stats() if self._arm == ON else None

    def _write(self, path: str, more: dict[str, Any]) -> None:
        seen = {"timers": {k: v.tolist() for k, v in self._timers.seen.items()}, **more}
        Path(path).write_text(json.dumps(seen), encoding="utf-8")
