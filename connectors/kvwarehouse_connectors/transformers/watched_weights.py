"""Whether a model's weights are those that it was joined with. Not thread-safe."""

from __future__ import annotations

import logging
from typing import Any

from kvwarehouse_connectors.core.live_weights import LiveWeights

_log = logging.getLogger(__name__)

# Every tensor of most models that run here, so that a change of one layer is seen too.
_TENSORS = 256


class WatchedWeights:
    """Raises UsageError (code "no_weights") where none are in memory between two prompts."""

    def __init__(self, model: Any) -> None:
        self._live = LiveWeights(model, _TENSORS)
        self._first = self._seen()
        self._changed = False

    def same(self) -> bool:
        """Returns False, for good, from the first call that finds others: whether all of them were
        put back is more than a sample can tell. Waits for the device."""
        if not self._changed and self._seen() != self._first:
            self._changed = True
            _log.warning(
                "the model's weights were changed: nothing is loaded or stored any more. Make a"
                " new WarehousePrefill with a weights= that names the new ones"
            )
        return not self._changed

    def _seen(self) -> tuple[object, bytes]:
        return self._live.census(), self._live.digest()
