"""The namespaces of an engine's pools: everything a page depends on besides its tokens.

SGLang's keys name tokens, salt and adapter, and nothing else; the rest stands here. A field too
many costs a miss, a field left out could cost a wrong answer.

Stateless. `weights_of` reads the files of the weights, so not on a thread that anybody waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import kvwarehouse as kvw
from kvwarehouse_connectors.core.identity import (
    checkpoint_fingerprint,
    digest_of,
    local_checkpoint,
    no_weights,
    short_name,
)
from kvwarehouse_connectors.sglang.engine_info import EngineInfo, PoolInfo, RankInfo, Split
from kvwarehouse_connectors.sglang.settings import WHERE, Settings

LAYOUT = "sglang/1"
"""Pages as SGLang's host pools have them (memory.py); which pool and order stands in extra."""
HASH_SCHEME = "sglang/sha256"


@dataclass(frozen=True)
class PageBytes:
    """Of one shard of a page: how many, and how they are arranged."""

    size: int
    order: str


def weights_of(engine: EngineInfo, settings: Settings) -> str:
    """A fingerprint of the weights that this engine loaded, or the name given in their place.
    Raises UsageError (code "no_weights") where there is neither."""
    if settings.weights:
        return settings.weights
    if engine.problem or not engine.checkpoint:
        problem = engine.problem or "SGLang's configuration is not there to name them"
        raise no_weights(problem, WHERE)
    found = checkpoint_fingerprint(engine.checkpoint, engine.revision, engine.cache_dir, WHERE)
    if not engine.more_checkpoints:
        return found
    more = {
        name: checkpoint_fingerprint(path, None, None, WHERE)
        for name, path in engine.more_checkpoints.items()
    }
    return digest_of([found, more])


def adapters_of(engine: EngineInfo, settings: Settings) -> str:
    """A digest of the adapters' names, paths and weights; "" without any. Raises UsageError (code
    "no_weights") where an adapter is in no file and kvwarehouse.weights does not stand for it."""
    if not engine.adapters:
        return ""
    return digest_of(
        {
            name: [path, _adapter_weights(path, engine.cache_dir, settings)]
            for name, path in engine.adapters.items()
        }
    )


def _adapter_weights(path: str, cache_dir: str | None, settings: Settings) -> list[str]:
    """Of an adapter on the hub SGLang reads adapter_config.json from the hub's own cache, and the
    weights from download_dir, where they are there."""
    try:
        config = local_checkpoint(path, None, None, WHERE)
    except kvw.UsageError:
        if settings.weights:
            return []
        raise
    try:
        weights = local_checkpoint(path, None, cache_dir, WHERE)
    except kvw.UsageError:
        weights = config
    if weights == config:
        return [kvw.fingerprint(weights)]
    told = (Path(config) / "adapter_config.json").read_text(encoding="utf-8")
    return [kvw.fingerprint(weights), told]


@dataclass(frozen=True)
class Identity:
    """What the namespaces of an engine have in common. adapters: as adapters_of has it."""

    engine: EngineInfo
    ranks: RankInfo
    weights: str
    adapters: str
    salt: str

    def namespace(self, pool: PoolInfo, split: Split, page: PageBytes) -> kvw.Namespace:
        return kvw.Namespace(
            model=short_name(self.engine.model),
            weights=self.weights,
            dtype=pool.dtype,
            layout=LAYOUT,
            page_tokens=pool.page_tokens,
            page_bytes=page.size,
            shards=split.shards,
            kv_dtype=pool.dtype,
            cache_group=pool.name,
            adapter=self.adapters,
            salt=self.salt,
            hash_scheme=HASH_SCHEME,
            extra={
                "config": digest_of(dict(self.engine.config)),
                "layout": pool.layout,
                "order": digest_of(page.order),
                "pool": pool.type_name,
                "shape": digest_of(self._shape(pool)),
                "sglang": self.engine.version,
                "stage": f"{self.ranks.pp_rank}/{self.ranks.pp_size}",
            },
        )

    def _shape(self, pool: PoolInfo) -> dict[str, str]:
        """Heads are counted over all ranks, so that ranks of another TP size find theirs."""
        return {**pool.shape, "heads": str(pool.heads * self.ranks.tp_size)}
