"""What the connector knows of an engine and its pools, as plain values, and what it cannot serve.

Stateless; knows nothing of SGLang's classes (compat.py does).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import kvwarehouse as kvw

SPLIT_LAYOUTS = ("page_head", "page_unified")
"""Those in which the heads of a page can be cut apart."""


@dataclass(frozen=True)
class EngineInfo:
    """What all of an engine's pages depend on."""

    version: str
    model: str = ""
    """The name it is served by, for people."""
    checkpoint: str = ""
    """Path or hub name of the weights; "" where SGLang's configuration is not there."""
    more_checkpoints: Mapping[str, str] = field(default_factory=dict)
    """Paths of what it computes with beside the checkpoint, or in its place, by SGLang's name."""
    revision: str | None = None
    cache_dir: str | None = None
    config: Mapping[str, str] = field(default_factory=dict)
    """Its configuration, as far as KV depends on it."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Name to path of the LoRA adapters it begins with: SGLang's keys have both, and not their
    weights."""
    speculation: str = ""
    ranks_of_host: int = 0
    """Tensor-parallel ranks on one host; 0 where not known."""
    problem: str = ""
    """Why nothing tells its weights; "" where something does."""
    salted_keys: bool = True
    """Whether its page keys name a request's salt; else all users would share."""


@dataclass(frozen=True)
class RankInfo:
    """Of this rank, as SGLang tells a storage backend."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_size: int = 1
    dcp_size: int = 1
    latent: bool = False
    """Whether the model's KV is the same on all ranks (MLA): one of them writes it."""
    tp_lcm_size: int = 0
    """Into how many groups of heads pages are cut for ranks of other TP sizes; 0: as ranks are."""


@dataclass(frozen=True)
class PoolInfo:
    """Of one host pool."""

    name: str
    """SGLang's: kv, mamba, swa, indexer, ..."""
    kind: str
    """mha, mla, state or index; "" for what is not known."""
    type_name: str
    layout: str
    page_tokens: int
    dtype: str
    shape: Mapping[str, str] = field(default_factory=dict)
    """Whatever else its bytes depend on: layers, heads, dimensions."""
    heads: int = 0
    """Of this rank; 0 where there are none."""
    problem: str = ""


@dataclass(frozen=True)
class Split:
    """How a page is cut: shards of all ranks, and those of this one, in the order of its parts."""

    shards: int
    mine: tuple[int, ...]


def split_of(pool: PoolInfo, ranks: RankInfo) -> Split:
    """Pages of a latent cache are one shard that all ranks read. Others have one for each rank, or
    for each group of heads where ranks of other TP sizes read them too."""
    if ranks.latent and pool.kind in ("mla", "index"):
        return Split(1, (0,))
    shards = ranks.tp_size
    if pool.kind == "mha" and ranks.tp_lcm_size:
        shards = ranks.tp_lcm_size
    each = shards // ranks.tp_size
    return Split(shards, tuple(range(ranks.tp_rank * each, (ranks.tp_rank + 1) * each)))


def check_engine(engine: EngineInfo, ranks: RankInfo) -> None:
    """Raises UsageError (code "unsupported") naming what was found and what is served."""
    if not engine.salted_keys:
        raise _refused(
            "page keys that leave out a request's cache_salt or extra_key, as those of SGLang",
            engine.version,
            "0.5.23 and later, whose keys have both",
        )
    if ranks.cp_size > 1:
        raise _refused("attention context parallelism", ranks.cp_size, "attn_cp_size 1")
    if ranks.dcp_size > 1:
        raise _refused("decode context parallelism", ranks.dcp_size, "dcp_size 1")
    if engine.speculation.upper() not in ("", "NGRAM"):
        raise _refused(
            "speculative decoding by", engine.speculation, "none, or NGRAM, which keeps no KV"
        )
    if 0 < engine.ranks_of_host < ranks.tp_size:
        raise _refused(
            "tensor-parallel ranks on several hosts:",
            f"{ranks.tp_size}, {engine.ranks_of_host} a host",
            "all ranks of a pipeline stage on one host, since a page is complete when the"
            " warehouse of one host has the shards of all of them",
        )


def check_pool(pool: PoolInfo, ranks: RankInfo) -> None:
    """Raises UsageError (code "unsupported") naming what was found and what is served."""
    if pool.problem:
        raise _refused(f"host pool {pool.name}", f"{pool.type_name}, which {pool.problem}", _POOLS)
    if not pool.kind:
        raise _refused(f"host pool {pool.name}", pool.type_name, _POOLS)
    if ranks.latent and ranks.tp_size > 1 and pool.kind == "mha":
        raise _refused(
            f"host pool {pool.name}, cut by heads, beside a latent cache",
            f"tp_size {ranks.tp_size}",
            "tp_size 1: SGLang stores it from one rank only",
        )
    cut = pool.kind == "mha" and ranks.tp_lcm_size > ranks.tp_size
    if cut and pool.layout not in SPLIT_LAYOUTS:
        raise _refused(
            f"tp_lcm_size {ranks.tp_lcm_size} with tp_size {ranks.tp_size} in layout",
            pool.layout,
            f"--hicache-mem-layout {' or '.join(SPLIT_LAYOUTS)}, or no tp_lcm_size",
        )
    if cut and pool.heads % (ranks.tp_lcm_size // ranks.tp_size):
        raise _refused(
            f"tp_lcm_size {ranks.tp_lcm_size} with tp_size {ranks.tp_size} and heads of a rank",
            pool.heads,
            "a tp_lcm_size that divides the model's KV heads",
        )


_POOLS = (
    "those of multi-head and of latent attention, states of state-space layers, and indexes of"
    " sparse attention (docs/sglang.md)"
)


def _refused(what: str, found: object, served: str) -> kvw.UsageError:
    return kvw.UsageError(
        f"kvwarehouse cannot serve {what} {found}; served: {served}", code="unsupported"
    )
