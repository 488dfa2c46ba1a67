"""A contract model of SGLang's host pools, in numpy: what a storage backend asks of them, as of
SGLang 0.5.23. It is not SGLang: tests/engines/sglang runs the same connector on the real ones.

One owner; not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


class ModelTensor:
    """As much of a tensor as is asked for. Shares the array's memory."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def data_ptr(self) -> int:
        return int(self.array.__array_interface__["data"][0])

    def contiguous(self) -> Self:
        if self.array.flags.c_contiguous:
            return self
        return type(self)(np.ascontiguousarray(self.array))

    def __getitem__(self, where: Any) -> ModelTensor:
        return ModelTensor(self.array[where])


class ModelPool:
    """Keys and values of `layers` layers, `heads` heads of `head_dim` 2-byte numbers, in one of
    SGLang's layouts; with latent=True one row a token and layer, as latent attention has it."""

    dtype = "bfloat16"

    def __init__(  # noqa: PLR0913 - a shape, by name
        self,
        layout: str,
        *,
        pages: int = 12,
        page_size: int = 4,
        layers: int = 3,
        heads: int = 4,
        head_dim: int = 32,
        latent: bool = False,
    ) -> None:
        self.layout, self.latent = layout, latent
        self.page_num, self.page_size, self.size = pages, page_size, pages * page_size
        self.layer_num, self.head_num, self.head_dim = layers, heads, head_dim
        self.array = np.zeros(self._shape(), np.uint16)
        self.kv_buffer = ModelTensor(self.array)
        self._free = list(range(pages))

    # -- what SGLang's pools have ----------------------------------------------------------------

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        return self._meta(indices, 1)

    def get_split_heads_page_buffer_meta(
        self, indices: Any, split_factor: int
    ) -> tuple[list[int], list[int]]:
        assert self.layout == "page_head"
        assert self.head_num % split_factor == 0
        return self._meta(indices, split_factor)

    def get_data_page(self, index: int, flat: bool = True) -> ModelTensor:
        view = self._page(index // self.page_size)
        return ModelTensor(view.reshape(-1) if flat else view)

    def get_dummy_flat_data_page(self) -> ModelTensor:
        return ModelTensor(np.zeros(self._page(0).size, np.uint16))

    def set_from_flat_data_page(self, index: int, data_page: ModelTensor) -> None:
        view = self._page(index // self.page_size)
        view[...] = data_page.array.reshape(view.shape)

    def alloc(self, need_size: int) -> NDArray[np.int64] | None:
        count = need_size // self.page_size
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return self.slots(taken)

    def free(self, indices: Any) -> int:
        self._free += [int(index) // self.page_size for index in indices[:: self.page_size]]
        return len(indices)

    # -- for tests -------------------------------------------------------------------------------

    def slots(self, pages: list[int]) -> NDArray[np.int64]:
        """Of whole pages: one a token, as SGLang passes them."""
        first = np.array(pages, np.int64)[:, None] * self.page_size
        return (first + np.arange(self.page_size)).reshape(-1)

    def fill(self, seed: int) -> None:
        """With noise."""
        noise = np.random.default_rng(seed).integers(0, 1 << 16, self.array.shape, np.uint16)
        self.array[...] = noise

    def content(self, pages: list[int]) -> bytes:
        return b"".join(self._page(page).tobytes() for page in pages)

    # -- within ----------------------------------------------------------------------------------

    def _shape(self) -> tuple[int, ...]:
        planes = () if self.latent else (2,)
        row = (1 if self.latent else self.head_num, self.head_dim)
        paged = (self.page_num, self.layer_num, self.page_size)
        return {
            "layer_first": (*planes, self.layer_num, self.size, *row),
            "page_first": (*planes, self.size, self.layer_num, *row),
            "page_first_direct": (*planes, *paged, *row),
            "page_head": (
                *planes,
                self.page_num,
                self.head_num,
                self.page_size,
                self.layer_num,
                self.head_dim,
            ),
        }[self.layout]

    def _page(self, page: int) -> NDArray[np.uint16]:
        """A view of a page; its first dimension is K and V, but of latent pools."""
        slots = slice(page * self.page_size, (page + 1) * self.page_size)
        before = () if self.latent else (slice(None),)
        if self.layout == "layer_first":
            return self.array[(*before, slice(None), slots)]
        if self.layout == "page_first":
            return self.array[(*before, slots)]
        return self.array[(*before, slice(page, page + 1))]

    def _runs(self, page: int, parts: int) -> Iterator[NDArray[np.uint16]]:
        """The contiguous pieces of a page, in the order in which SGLang tells them."""
        view = self._page(page)
        if self.latent:
            yield from view if self.layout == "layer_first" else [view]
        elif self.layout == "layer_first":
            yield from (view[kv, layer] for layer in range(self.layer_num) for kv in (0, 1))
        elif parts == 1:
            yield from (view[0], view[1])
        else:
            each = self.head_num // parts
            for first in range(0, self.head_num, each):
                yield from (view[kv, :, first : first + each] for kv in (0, 1))

    def _meta(self, indices: Any, parts: int) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        addresses, sizes = [], []
        for first in indices.tolist()[:: self.page_size]:
            for run in self._runs(first // self.page_size, parts):
                assert run.flags.c_contiguous
                addresses.append(int(run.__array_interface__["data"][0]))
                sizes.append(run.nbytes)
        return addresses, sizes
