"""A cache whose tensors are made once, with room for the prompt and what is generated after it.

transformers' own DynamicLayer concatenates: every step copies the whole prefix again. Here a step
writes its tokens behind the others, and a load from the warehouse writes into the same memory, so
that a prefix is copied exactly once, from the warehouse into the tensors that attention reads.

Not thread-safe, as the library's caches. Invariant: memory of tokens that were *held* is never
written again by the cache, so that a store may read it while generation goes on.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvwarehouse_connectors.core import PlaneMemory
from kvwarehouse_connectors.transformers.support import CacheShape

_GROWTH = 1.5


class RoomyLayer(DynamicLayer):
    """One layer: keys [1, key heads, tokens, key size] and values likewise, as DynamicLayer has
    them, but as views of two larger tensors, its rooms.

    Whatever puts other tensors in the place of the views (beam search, repeats) turns it into a
    plain DynamicLayer until the next reset."""

    def __init__(self, room_tokens: int) -> None:
        super().__init__()
        self.room_tokens = room_tokens
        self._held = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.make_room(key_states, value_states)

    def make_room(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Allocates the rooms, uninitialised, with the heads, size, dtype and device of `keys` and
        of `values`: [1, heads, tokens, size] of any number of tokens."""
        self._key_room = self._room(keys)
        self._value_room = self._room(values)
        self._held = 0
        self.show(0)

    @property
    def rooms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, heads, room_tokens, size] of keys and of values, contiguous."""
        return self._key_room, self._value_room

    def show(self, tokens: int) -> None:
        """Makes the rooms' first `tokens` tokens, whatever is in them, the layer's content."""
        self.keys = self._key_view = self._key_room[:, :, :tokens]
        self.values = self._value_view = self._value_room[:, :, :tokens]

    def hold(self, tokens: int) -> None:
        """From now on the rooms' first `tokens` tokens are not written again; a step that would
        have to goes to new rooms."""
        self._held = max(self._held, tokens)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self._shown():
            plain: tuple[torch.Tensor, torch.Tensor]
            plain = super().update(key_states, value_states, *args, **kwargs)
            return plain
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if end > self.room_tokens or start < self._held:
            self._move(start, end)
        self._key_room[:, :, start:end] = key_states
        self._value_room[:, :, start:end] = value_states
        self.show(end)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        if not self.is_initialized:  # nothing to take away; transformers below 5.22 would raise
            return
        shown = self._shown()
        super().crop(tokens_to_remove)
        if shown:
            self.show(self.keys.shape[-2])

    def reset(self) -> None:
        # As the library's in 5.24; in 5.16 it zeroes the tensors in place, which a store may still
        # be reading. A layer that is not initialised is not zeroed by what is inherited.
        self.keys = self.values = None
        self.is_initialized = False
        super().reset()

    def _room(self, like: torch.Tensor) -> torch.Tensor:
        heads, size = like.shape[1::2]
        shape = (1, heads, self.room_tokens, size)
        # A cache made under inference mode must still take steps outside of it.
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=like.dtype, device=like.device)

    def _shown(self) -> bool:
        """Whether keys and values are still the views of the rooms."""
        return (
            self.is_initialized and self.keys is self._key_view and self.values is self._value_view
        )

    def _move(self, tokens: int, needed: int) -> None:
        old_keys, old_values = self.keys, self.values
        if needed > self.room_tokens:
            self.room_tokens = max(needed, int(self.room_tokens * _GROWTH))
        self.make_room(old_keys, old_values)
        self._key_room[:, :, :tokens] = old_keys
        self._value_room[:, :, :tokens] = old_values


class RoomyCache(DynamicCache):
    """A DynamicCache of RoomyLayers, made before the first token so that a load can fill it."""

    def __init__(self, config: Any, shape: CacheShape, room_tokens: int) -> None:
        super().__init__(config=config)
        self.layers: list[RoomyLayer] = []
        for key_heads, key_size, value_heads, value_size in shape.heads:
            layer = RoomyLayer(room_tokens)
            keys, values = (
                torch.empty((1, heads, 0, size), dtype=shape.dtype, device=shape.device)
                for heads, size in ((key_heads, key_size), (value_heads, value_size))
            )
            layer.make_room(keys, values)
            layer.device, layer.is_initialized = shape.device, True
            self.layers.append(layer)

    @property
    def rooms(self) -> list[torch.Tensor]:
        """Keys' and values' rooms, layer by layer: the planes of the page geometry."""
        return [room for layer in self.layers for room in layer.rooms]

    def show(self, tokens: int) -> None:
        """See RoomyLayer.show."""
        for layer in self.layers:
            layer.show(tokens)

    def hold(self, tokens: int) -> None:
        """See RoomyLayer.hold."""
        for layer in self.layers:
            layer.hold(tokens)


def plane_memory(room: torch.Tensor) -> PlaneMemory:
    """Where a room lies, in its device's memory."""
    return PlaneMemory(room.data_ptr(), room.stride(1) * room.element_size())
