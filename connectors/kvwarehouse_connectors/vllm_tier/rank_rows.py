"""Where the chunks of each cache group lie in a row of vLLM's CPU tier, as one worker sees it.

A row has the workers' parts one after another; a part has, for each tensor of the worker's cache,
the blocks of a chunk; and a group uses of each block what its layers need. In vLLM's canonical
layout all workers write one part, whose bytes are the same for other numbers of ranks.

Stateless.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvwarehouse_connectors.core.identity import digest_of
from kvwarehouse_connectors.vllm import compat

Extents = tuple[tuple[int, int], ...]
"""Offset and bytes of each piece, in order, with a gap between any two."""


@dataclass(frozen=True)
class GroupRows:
    extents: Extents
    layout: str
    """A digest of what these bytes are: layers, shapes, their order."""
    attention_backend: str
    kv_dtype: str


@dataclass(frozen=True)
class RankRows(compat.KVConnectorHandshakeMetadata):
    """A worker tells the scheduler once. groups: in the order of vLLM's offloading groups."""

    rank: int
    device: str
    order: str
    """vLLM's name of the layout of its cache."""
    groups: tuple[GroupRows, ...]


def rank_rows(
    vllm_config: Any, kv_cache_config: Any, spec: Any, canonical: Any, caches: Mapping[str, Any]
) -> RankRows:
    """spec: vLLM's OffloadingSpec. canonical: its CanonicalKVCaches. caches: tensors by layer."""
    shared = bool(spec.config.canonical_layout)
    rank = int(spec.config.parallel.rank)
    begin = 0 if shared or spec.replicated_layout else rank * spec.cpu_page_size_per_worker
    used = [
        [(int(ref.tensor_idx), _bytes_used(ref, shared)) for ref in refs]
        for refs in canonical.group_data_refs
    ]
    sizes = [int(tensor.page_size_bytes) for tensor in canonical.tensors]
    if shared:
        sizes = [max(s for group in used for t, s in group if t == i) for i in range(len(sizes))]
    device, groups = "", []
    for group, mine in zip(spec.config.groups, used, strict=True):
        names = tuple(name for name in group.layer_names if name in caches)
        views = [view for name in names for view in _tensors(caches[name])]
        device = str(views[0].device.type) if views else device  # a stage may have no such layer
        backend = compat.attention_backends(vllm_config, names)
        if device == "cpu":
            of_group = compat.group_spec(kv_cache_config.kv_cache_groups[group.group_id])
            backend = f"{backend}/{compat.instruction_set(vllm_config, of_group)}"
        # Canonical bytes do not depend on how a rank's own tensors look.
        shapes = [] if shared else [[list(v.shape[1:]), list(v.stride()[1:])] for v in views]
        dtypes = sorted({str(view.dtype).removeprefix("torch.") for view in views})
        groups.append(
            GroupRows(
                extents=extents(begin, sizes, mine, spec.blocks_per_chunk),
                layout=digest_of([names, mine, sizes, shapes, spec.blocks_per_chunk]),
                attention_backend=backend,
                kv_dtype=f"{'+'.join(dtypes)}/{vllm_config.cache_config.cache_dtype}",
            )
        )
    order = str(vllm_config.cache_config.kv_cache_layout or "")
    return RankRows(rank, device, order, tuple(groups))


def _bytes_used(ref: Any, shared: bool) -> int:
    return int(ref.mapping.canonical_page_size_bytes if shared else ref.page_size_bytes)


def _tensors(cache: Any) -> Sequence[Any]:
    """A layer's cache: one tensor, or a state's several."""
    return cache if isinstance(cache, list | tuple) else [cache]


def extents(
    begin: int, sizes: Sequence[int], used: Iterable[tuple[int, int]], blocks: int
) -> Extents:
    """begin: of the worker's part of a row. sizes: bytes of a block in each tensor. used: of a
    group, tensors and how much of a block in it. blocks: of a chunk."""
    begins = [begin]
    for size in sizes:
        begins.append(begins[-1] + size * blocks)
    return joined(
        (begins[tensor] + block * sizes[tensor], size)
        for tensor, size in used
        for block in range(blocks)
    )


def joined(pieces: Iterable[tuple[int, int]]) -> Extents:
    """In order, those that touch or overlap as one."""
    made: list[tuple[int, int]] = []
    for offset, size in sorted(pieces):
        if made and offset <= made[-1][0] + made[-1][1]:
            first, reach = made[-1]
            made[-1] = first, max(reach, offset + size - first)
        elif size:
            made.append((offset, size))
    return tuple(made)
