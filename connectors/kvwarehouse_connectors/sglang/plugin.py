"""What SGLang calls in each of its processes, through the entry point group `sglang.srt.plugins`:
asks its registry for hooks before whatever changes an engine's weights (weight_updates.py).

Written against 0.5.23. Imports nothing of the connector but the hooks, and none of SGLang's modules
that its process has not loaded.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from kvwarehouse_connectors.sglang import weight_updates
from kvwarehouse_connectors.sglang.weight_updates import PROBE, ProbedError

_RUNNER = "sglang.srt.model_executor.model_runner"
_SCHEDULER = "sglang.srt.managers.scheduler"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

# Of WeightUpdater, what does not write to the model; every other public method counts as writing.
_WRITES_NOTHING = (
    "destroy_weights_update_group",
    "init_weights_update_group",
    "receive_weights_from_distributed",
)


def register() -> None:
    """May be called more than once."""
    if _SCHEDULER not in sys.modules:  # a process without a model
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in _hooks().items():
        kind = HookType.AROUND if hook.__name__.startswith("around") else HookType.BEFORE
        HookRegistry.register(target, hook, kind)


def unseen() -> list[str]:
    """What may change the weights of the model in this process unseen: methods without their hook,
    or that this SGLang does not have. Empty where there is no scheduler, and so no model."""
    if _SCHEDULER not in sys.modules:
        return []
    return [target for target in _hooks() if not _is_hooked(target)]


def _hooks() -> dict[str, Callable[..., Any]]:
    """By the method that they stand before or around."""
    return {
        **{f"{_UPDATER}.WeightUpdater.{name}": weight_updates.before_write for name in _writers()},
        f"{_RUNNER}.ModelRunner.check_weights": weight_updates.before_check,
        f"{_MANAGER}.release_memory_occupation": weight_updates.before_release,
        f"{_MANAGER}.resume_memory_occupation": weight_updates.around_resume,
        f"{_SCHEDULER}.Scheduler.flush_cache": weight_updates.around_flush,
    }


def _writers() -> list[str]:
    try:
        updater = pkgutil.resolve_name(f"{_UPDATER}.WeightUpdater")
    except (ImportError, AttributeError):
        return ["update_weights_from_disk"]  # which then is unseen
    return [
        name
        for name, value in vars(updater).items()
        if callable(value) and not name.startswith("_") and name not in _WRITES_NOTHING
    ]


def _is_hooked(target: str) -> bool:
    """Asks the hook itself, by a call that it does not let through; without it, the method finds
    nothing of what it needs in the probe."""
    try:
        pkgutil.resolve_name(target)(PROBE, None)
    except ProbedError:
        return True
    except Exception:  # noqa: BLE001 - whatever a method without a hook makes of the probe
        return False
    return False
