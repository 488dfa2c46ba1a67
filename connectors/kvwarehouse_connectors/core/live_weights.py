"""A sample of a model's weights as they are in memory, to see that they change.

A checkpoint's fingerprint says what an engine loaded at its start. Engines can take other weights
while they run (a reload, a trainer's update, a wake from sleep), in place and behind the back of
whoever keeps their KV; neither a tensor's address nor torch's version counter tells.

Needs torch. A LiveWeights belongs to one thread, in whose current stream it reads; its samples may
go to any.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

_MOST_PIECES = 96
_PIECE_BYTES = 1024


class WeightsSample:
    """Bytes of weights as they were when the device came to this place in its stream."""

    def __init__(self, parts: list[Any], copied: list[Any]) -> None:
        self._parts, self._copied = parts, copied

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return all(event.query() for event in self._copied)

    def same_as(self, other: WeightsSample) -> bool:
        """Waits as `wait` does, for both."""
        self.wait()
        other.wait()
        return len(self._parts) == len(other._parts) and all(
            torch.equal(mine, theirs)
            for mine, theirs in zip(self._parts, other._parts, strict=True)
        )

    def bytes(self) -> bytes:
        """All of them; waits as `wait` does."""
        self.wait()
        return b"".join(part.numpy().tobytes() for part in self._parts)

    def wait(self) -> None:
        """Until the device has come to it."""
        for event in self._copied:
            event.synchronize()
        self._copied = []


class LiveWeights:
    """Of the parameters of some modules: a piece of 1 KiB each of at most 96, so many of each kind
    (a name without its numbers), spread over the layers, at a place that is the same in every
    process. What changes one weight in 10,000, wherever they lie, is missed in less than one case
    of a hundred in bfloat16; what changes none of these pieces is missed.

    leave_out: by name, parameters that may change while the model stays the same. Raises ValueError
    where there is no parameter that can be read."""

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        leave_out: Callable[[str], bool] = lambda name: False,
    ) -> None:
        found: dict[int, tuple[str, Any, str]] = {}
        for name, owner, own_name in _parameters(modules):
            if not leave_out(name):
                found.setdefault(id(owner._parameters[own_name]), (name, owner, own_name))
        self._places = _spread(list(found.values()))
        self._addresses: list[int] = []
        self._pieces: dict[Any, list[Any]] = {}
        if not self.sample().bytes():
            raise ValueError(f"none of {len(found)} parameters can be read")

    def sample(self) -> WeightsSample:
        """Reads in the order of the current stream and waits for nothing: on a CPU some tens of
        microseconds, elsewhere one kernel and one copy of 96 KiB for each device."""
        self._find_pieces()
        parts, copied = [], []
        with torch.inference_mode():
            for device, pieces in self._pieces.items():
                together = torch.cat(pieces)
                if device.type == "cpu":
                    parts.append(together)
                    continue
                host = torch.empty(together.shape, dtype=torch.uint8, pin_memory=True)
                host.copy_(together, non_blocking=True)
                event = torch.Event(device)
                event.record()
                parts.append(host)
                copied.append(event)
        return WeightsSample(parts, copied)

    def _find_pieces(self) -> None:
        """Where parameters lie may change with what they hold."""
        tensors = [owner._parameters.get(own_name) for _, owner, own_name in self._places]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if addresses == self._addresses:
            return
        self._pieces = {}
        for (name, _, _), tensor in zip(self._places, tensors, strict=True):
            piece = None if tensor is None else _piece(name, tensor)
            if piece is not None:
                self._pieces.setdefault(piece.device, []).append(piece)
        self._addresses = addresses


def _parameters(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[str, Any, str]]:
    """A name, the module that has the parameter, and its name there."""
    for module in modules:
        for prefix, owner in module.named_modules():
            for own_name, parameter in owner._parameters.items():
                if parameter is not None:
                    yield f"{prefix}.{own_name}", owner, own_name


def _spread(found: list[tuple[str, Any, str]]) -> list[tuple[str, Any, str]]:
    """At most _MOST_PIECES of them. Spread over all by number alone, they could all be norms."""
    kinds: dict[str, list[tuple[str, Any, str]]] = {}
    for place in found:
        kinds.setdefault(re.sub(r"\d+", "#", place[0]), []).append(place)
    chosen = []
    left = _MOST_PIECES
    # The rarer kinds first, so that what they do not need goes to the others.
    for number, places in enumerate(sorted(kinds.values(), key=len)):
        share = min(len(places), max(1, left // (len(kinds) - number)), left)
        last = len(places) - 1
        chosen += [places[last * i // max(1, share - 1)] for i in range(share)]
        left -= share
    return chosen


def _piece(name: str, tensor: Any) -> Any:
    """_PIECE_BYTES of a tensor's memory, whatever its dtype and strides; None where it has none."""
    try:
        storage = tensor.untyped_storage()
        begin = tensor.storage_offset() * tensor.element_size()
        size = storage.nbytes() - begin
        if not tensor.numel() or size <= 0 or tensor.device.type == "meta":
            return None
        spanned = 1 + sum(
            (length - 1) * stride
            for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        size = min(size, spanned * tensor.element_size())
        step = min(size, _PIECE_BYTES)
        begin += random.Random(name).randrange(size - step + 1)
        view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return view.set_(storage, begin, (step,), (1,))
    except (NotImplementedError, RuntimeError):
        return None  # a tensor that is a program's object, not memory
