"""Where the pages of an engine's host pool lie.

SGLang's pools tell, page by page, the addresses and sizes of a page's pieces (get_page_buffer_meta,
and get_split_heads_page_buffer_meta for pages cut by heads). They lie at equal distances from page
to page; that is learned once, and checked, so that a call for many pages does no Python per page.

A *part* of a page is what one shard of the warehouse has: the whole page, or, where ranks of other
TP sizes are to read it, one group of its heads. The bytes of a part are its pieces in the order of
memory where the pool is one tensor: that is SGLang's own flat page (get_data_page), so that its
interfaces with and without copies share pages. Where a pool is several tensors, the order is the
pool's own.

Knows tensors only as things with data_ptr() and nbytes. Immutable; thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw

PAGE_UNIFIED = "page_unified"

_BUFFERS = ("kv_buffer", "k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer")


@dataclass(frozen=True)
class PieceMemory:
    """Piece j of part g of page p: piece_bytes[g, j] bytes at bases[g, j] + p * strides[g, j]."""

    owners: tuple[Any, ...]
    bases: NDArray[np.uint64]
    strides: NDArray[np.int64]
    piece_bytes: NDArray[np.uint64]
    page_tokens: int
    pages: int
    flat: bool
    """Whether all parts, in the order of memory, are SGLang's own flat page."""

    @property
    def parts(self) -> int:
        return len(self.bases)

    @property
    def part_bytes(self) -> int:
        return int(self.piece_bytes[0].sum())

    @property
    def order(self) -> str:
        """What tells how a part's bytes are arranged, beside the pool's shape."""
        sizes = ",".join(str(int(size)) for size in self.piece_bytes[0])
        return f"{'flat' if self.flat else 'pieces'}:{sizes}"

    def regions(self, pages: NDArray[np.int64], part: int) -> kvw.Regions:
        return kvw.Regions.strided(
            self.owners,
            self.bases[part],
            self.strides[part],
            self.piece_bytes[part],
            pages.reshape(-1, 1),
        )


def piece_memory(pool: Any, parts: int) -> PieceMemory:
    """The pieces of a pool's pages. parts: into how many groups of heads each is cut.

    Raises UsageError (code "unsupported") where the pool cannot tell, or where its pages do not lie
    at equal distances inside its tensors."""
    owners = tuple(_tensors(pool))
    tokens, count = int(pool.page_size), int(pool.page_num)
    probes = sorted({0, 1, count // 2, count - 1} & set(range(count)))
    found = [_pieces(pool, page, parts) for page in probes]
    addresses = np.array([[address for address, _ in pieces] for pieces in found], np.int64)
    sizes = np.array([[size for _, size in pieces] for pieces in found], np.int64)
    strides = addresses[1] - addresses[0] if count > 1 else np.zeros_like(addresses[0])
    expected = addresses[0] + np.array(probes)[:, None] * strides
    if (addresses != expected).any() or (sizes != sizes[0]).any():
        raise unsupported(pool, "has pages that do not lie at equal distances")
    flat = _inside(pool.kv_buffer, addresses, sizes) if _is_tensor(pool.kv_buffer) else False
    if not flat and not _inside_any(owners, addresses, sizes):
        raise unsupported(pool, "tells addresses outside its tensors")
    bases = addresses[0].reshape(parts, -1)
    order = np.argsort(bases, axis=1) if flat else np.tile(np.arange(bases.shape[1]), (parts, 1))

    def arranged(values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.take_along_axis(values.reshape(parts, -1), order, axis=1)

    return PieceMemory(
        owners,
        arranged(addresses[0]).astype(np.uint64),
        arranged(strides),
        arranged(sizes[0]).astype(np.uint64),
        tokens,
        count,
        flat,
    )


def page_numbers(indices: Any, pages: int, page_tokens: int, most: int) -> NDArray[np.int64]:
    """The pages whose slots `indices` are: SGLang passes a slot for each token. Raises UsageError
    (code "bad_pages") where they are not `pages` whole pages of a pool of `most`."""
    slots = np.asarray(indices.cpu() if hasattr(indices, "cpu") else indices, np.int64).reshape(-1)
    if len(slots) != pages * page_tokens:
        raise kvw.UsageError(
            f"{len(slots)} slots for {pages} pages of {page_tokens} tokens; pass one a token",
            code="bad_pages",
        )
    rows = slots.reshape(pages, page_tokens)
    numbers = rows[:, 0] // page_tokens
    whole = numbers[:, None] * page_tokens + np.arange(page_tokens)
    if (rows != whole).any() or (numbers < 0).any() or (numbers >= most).any():
        raise kvw.UsageError(
            f"the slots are not whole pages of a pool of {most} pages of {page_tokens} tokens",
            code="bad_pages",
        )
    return numbers


def unsupported(pool: Any, problem: str) -> kvw.UsageError:
    return kvw.UsageError(
        f"kvwarehouse cannot serve the host pool {type(pool).__name__} in layout"
        f" {getattr(pool, 'layout', '?')}: it {problem}",
        code="unsupported",
    )


def _pieces(pool: Any, page: int, parts: int) -> list[tuple[int, int]]:
    """(address, bytes) of the pieces of a page, part after part."""
    if pool.layout == PAGE_UNIFIED:
        return _unified_pieces(pool, page, parts)
    slots = np.arange(page * pool.page_size, (page + 1) * pool.page_size)
    try:
        if parts > 1:
            meta = pool.get_split_heads_page_buffer_meta(slots, parts)
        else:
            meta = pool.get_page_buffer_meta(slots)
    except (AssertionError, AttributeError, NotImplementedError, ValueError) as error:
        what = f"cannot be cut into {parts} groups of heads" if parts > 1 else "tells no addresses"
        raise unsupported(pool, f"{what} ({error})") from error
    if not meta or not meta[0] or len(meta[0]) % parts:
        raise unsupported(pool, "tells no addresses")
    return [(int(address), int(size)) for address, size in zip(*meta, strict=True)]


def _unified_pieces(pool: Any, page: int, parts: int) -> list[tuple[int, int]]:
    """In this layout a page is one block of memory, outermost its groups of heads, but the pool
    tells no addresses."""
    layout = pool.page_unified_layout
    if layout.head_group_num % parts:
        raise unsupported(
            pool, f"has {layout.head_group_num} groups of heads, not a multiple of {parts}"
        )
    size = layout.bytes_per_page // parts
    begin = pool.kv_buffer.data_ptr() + page * layout.bytes_per_page
    return [(begin + part * size, size) for part in range(parts)]


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr")


def _tensors(pool: Any) -> Iterator[Any]:
    held = [getattr(pool, name, None) for name in _BUFFERS if pool.layout != PAGE_UNIFIED]
    if hasattr(pool, "get_hybrid_pool_buffer") and pool.layout != PAGE_UNIFIED:
        held += list(pool.get_hybrid_pool_buffer())
    for value in [pool.kv_buffer, *held]:
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if _is_tensor(tensor):
                yield tensor


def _inside(tensor: Any, addresses: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
    begin = tensor.data_ptr()
    return bool((addresses >= begin).all() and (addresses + sizes <= begin + tensor.nbytes).all())


def _inside_any(
    tensors: Sequence[Any], addresses: NDArray[np.int64], sizes: NDArray[np.int64]
) -> bool:
    """Whether each piece, wherever its page, lies in one of the tensors."""
    return all(
        any(_inside(tensor, addresses[:, [j]], sizes[:, [j]]) for tensor in tensors)
        for j in range(addresses.shape[1])
    )
