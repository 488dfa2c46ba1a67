"""A digest of a model's weights as they lie in memory now, to see that they are not what they were.

A fingerprint says which files were loaded. An engine may then change the weights in place, without
a word to its connector. No address need change for that, and no counter of torch's does where
`.data` is written: so the contents are looked at.

`digest` looks closely and waits; `sample` is for every step of an engine.

Not thread-safe; samples may go to any thread. The caller sees to it that the weights' memory is
there (an engine may give it back while it sleeps: reading it then ends the process) and is not
written to meanwhile. Needs torch.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import kvwarehouse as kvw

TENSORS = 64
_RUNS = 4096  # in all tensors together
_RUN_ELEMENTS = 16  # which cost about what one does: they lie in one line of a cache
_INDICES = 256
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PIECE_BYTES = 1024  # of one tensor, in a sample for each step


class WeightsSample:
    """Bytes of weights as they were when the device came to this place in its stream."""

    def __init__(self, parts: list[torch.Tensor], copied: list[Any]) -> None:
        self._parts, self._copied = parts, copied

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return all(event.query() for event in self._copied)

    def wait(self) -> None:
        """Until the device has come to it."""
        for event in self._copied:
            event.synchronize()

    def same_as(self, other: WeightsSample) -> bool:
        """Waits as `wait` does, for both."""
        self.wait()
        other.wait()
        return len(self._parts) == len(other._parts) and all(
            torch.equal(mine, theirs)
            for mine, theirs in zip(self._parts, other._parts, strict=True)
        )


class LiveWeights:
    """A sample of a model's parameters and buffers: at most `tensors` of them, of every kind as
    many as of another (names that differ in numbers only are one kind), always the first and the
    last; of each, runs of 16 elements at even distances, 65,536 elements in all.

    It misses a change of elements that are not in the sample and of nothing else: some rows of an
    embedding, say, or one layer of many. A training step, another checkpoint, a merged adapter or
    another quantization change a part of nearly every tensor. In bfloat16 a small step leaves most
    elements as they were: if it changes one in a thousand, the odds of missing it are below 1e-28.

    `digest` looks the tensors up by name each time, so that one put in another's place is seen.
    Tensors on `meta`, sparse ones and those of torch's qint types cannot be read and are left out;
    what is a wrapper (DTensor, torchao) is read by its parts. Raises UsageError (code "no_weights")
    where nothing can be read.

    leave_out: by name, what may change while the model stays the same."""

    def __init__(
        self,
        model: torch.nn.Module,
        tensors: int = TENSORS,
        leave_out: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._model = model
        readable = [
            name for name, tensor in _named(model) if _is_readable(tensor) and not leave_out(name)
        ]
        if not readable:
            raise kvw.UsageError(
                f"no weights of {type(model).__name__} are in memory, so that a change of them"
                " could not be seen",
                code="no_weights",
            )
        self._names = _spread(readable, tensors)
        self._runs = max(1, _RUNS // len(self._names))
        self._indices: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._places = [_place(model, name) for name in self._names]
        self._addresses: list[int] = []
        self._pieces: dict[torch.device, list[torch.Tensor]] = {}

    def sample(self) -> WeightsSample:
        """1 KiB of each of the tensors, read in the order of the current stream without waiting: on
        a CPU some tens of microseconds, elsewhere one kernel and one copy a device. A change of one
        element in a thousand is missed in less than one case of 10^14, of one in 10,000 in one of
        25 (64 tensors in bfloat16). A tensor in another's place in its module is seen, a module in
        another's place is not."""
        self._find_pieces()
        parts: list[torch.Tensor] = []
        copied: list[Any] = []
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
        """Where tensors lie may change with what they hold."""
        found = [
            part
            for module, name in self._places
            for part in _parts(_own(module, name))
            if part is not None
        ]
        addresses = [part.data_ptr() for part in found]
        if addresses == self._addresses:
            return
        self._pieces = {}
        for part in found:
            if _is_readable(part):
                self._pieces.setdefault(part.device, []).append(_piece(part))
        self._addresses = addresses

    def digest(self) -> bytes:
        """16 bytes over names, types, shapes and elements of the sample; not over devices and
        addresses.

        Waits for the current stream of each device. One small kernel a tensor and one copy of at
        most 0.5 MiB a device; on a CPU about 0.7 ms of one core for 64 tensors in bfloat16."""
        heads: list[str] = []
        samples: list[torch.Tensor] = []
        with torch.no_grad():
            for name in self._names:
                for part in _parts(_found(self._model, name)):
                    heads.append(f"{name} {_described(part)}")
                    if _is_readable(part):
                        samples.append(self._sample(part))
            rows = _on_host(samples)
        hashed = hashlib.blake2b("\n".join(heads).encode(), digest_size=16)
        for row in rows:
            hashed.update(row.numpy())
        return hashed.digest()

    def census(self) -> tuple[int, int]:
        """How many parameters and buffers there are, and how many operations wrote to them in
        place, as torch counts them: a cheap first sign, of all tensors. Writes to `.data`, to
        another view of the memory and in inference mode are not counted, so that an equal census
        proves nothing."""
        writes = [0 if one.is_inference() else one._version for _, one in _named(self._model)]
        return len(writes), sum(writes)

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bytes, on the tensor's device."""
        bits = tensor.detach().view(_BITS[tensor.itemsize])
        # take() needs no contiguous copy of the tensor, which could be as large as the weights.
        return torch.take(bits, self._index(tensor.device, tensor.numel())).view(torch.uint8)

    def _index(self, device: torch.device, elements: int) -> torch.Tensor:
        found = self._indices.get((device, elements))
        if found is None:
            if len(self._indices) >= _INDICES:
                self._indices.clear()
            found = _positions(elements, self._runs).to(device)
            self._indices[device, elements] = found
        return found


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    # Buffers too: quantized weights and their scales often are buffers.
    return itertools.chain(model.named_parameters(), model.named_buffers())


def _found(model: torch.nn.Module, name: str) -> torch.Tensor | None:
    try:
        module, leaf = _place(model, name)
        found = getattr(module, leaf)
    except AttributeError:
        return None
    return found if isinstance(found, torch.Tensor) else None


def _place(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """The module that has a tensor, and its name there."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _own(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    found = module._parameters.get(name)
    return found if found is not None else module._buffers.get(name)


def _piece(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes from the middle of a tensor's memory, whatever its dtype and strides."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    spanned = 1 + sum((length - 1) * stride for length, stride in steps)
    size = min(_PIECE_BYTES, spanned * tensor.itemsize)
    begin = tensor.storage_offset() * tensor.itemsize + (spanned * tensor.itemsize - size) // 2
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), begin, (size,), (1,))


def _parts(tensor: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The plain tensors of a wrapper, which has no memory of its own."""
    if tensor is None or type(tensor) in _PLAIN or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]


def _is_readable(tensor: torch.Tensor | None) -> bool:
    return any(
        part is not None
        and part.layout == torch.strided
        and not part.is_meta
        and not part.is_quantized
        and part.numel() > 0
        and part.itemsize in _BITS
        for part in _parts(tensor)
    )


def _described(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "absent"
    kind = "meta" if tensor.is_meta else "in memory"
    return f"{kind} {tensor.dtype} {list(tensor.shape)}"


def _spread(names: list[str], most: int) -> list[str]:
    """One of each kind, then a second of each, and so on: strides would fall into step with the
    layers, and look at one kind only."""
    kinds = defaultdict(list)
    for name in names:
        kinds[re.sub(r"\d+", "#", name)].append(name)
    rounds = itertools.zip_longest(*map(_far_apart, kinds.values()))
    in_order = (name for each in rounds for name in each if name is not None)
    return list(dict.fromkeys((names[0], names[-1], *in_order)))[:most]


def _far_apart(names: list[str]) -> Iterable[str]:
    """The first, the middle, the quarters: by the index read backwards."""
    bits = len(names).bit_length()
    order = sorted(range(1 << bits), key=lambda at: f"{at:0{bits}b}"[::-1])
    return (names[at] for at in order if at < len(names))


def _positions(elements: int, runs: int) -> torch.Tensor:
    if elements <= runs * _RUN_ELEMENTS:
        return torch.arange(elements)
    begins = torch.arange(runs) * (elements - _RUN_ELEMENTS) // max(1, runs - 1)
    return (begins.unsqueeze(1) + torch.arange(_RUN_ELEMENTS)).flatten()


def _on_host(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same rows in the same order; one copy a device."""
    rows: list[torch.Tensor] = list(samples)
    places = defaultdict(list)
    for at, sample in enumerate(samples):
        places[sample.device].append(at)
    for where in places.values():
        joined = torch.cat([samples[at] for at in where]).cpu()
        sizes = [samples[at].numel() for at in where]
        for at, row in zip(where, joined.split(sizes), strict=True):
            rows[at] = row
    return rows
