"""What the scheduler tells the workers with each step. Pickled by TensorRT-LLM: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvwarehouse_connectors.core.page_run import PageRun


@dataclass(frozen=True)
class LoadOrder:
    """One request's promised load. Its blocks are the worker's until it is done."""

    request_id: int
    runs: tuple[PageRun, ...]
    """Empty: there is nothing to load any more, and the engine waits to hear of it."""
    waits: bool
    """Whether the step waits for it; else the request alone does."""


@dataclass(frozen=True)
class SaveOrder:
    """Blocks of a finished request that are held until they are copied."""

    request_id: int
    runs: tuple[PageRun, ...]


@dataclass
class TrtllmStepMetadata:
    """One step's work."""

    spaces: tuple[bytes, ...] = ()
    """Ids of the namespaces: every rank must have the same."""
    barrier_key: bytes = b""
    """Ranks that have not answered this yet do so, once they can load; b"": nobody asks."""
    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[PageRun] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
