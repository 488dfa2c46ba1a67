"""Pages between the arena and a GPU, scattered over a cache there, beside one large copy between
page-locked memory and the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvwarehouse_bench.gpu.device_pages import PATIENCE_S, Card, DevicePages, Memory
from kvwarehouse_bench.gpu.goals import FROM_GPU, TO_GPU, PartOutcome
from kvwarehouse_bench.harness.alternation import alternate, timed
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_bench.micro.figures import Figure

_GOAL = "ratio 0.9 or more"
_LIMIT = "one large copy"
_SIZES = (256 << 10, 1 << 20, 2 << 20, 8 << 20)


@dataclass(frozen=True)
class PinnedWork:
    moved_bytes: int = 1 << 30
    """By each side of a round."""
    page_sizes: Sequence[int] = _SIZES
    rounds: int = 7


def pinned(card: Card, folder: Path, work: PinnedWork) -> PartOutcome:
    """Blocks for some minutes. Raises RuntimeError where pages did not come or go whole."""
    folder.mkdir(parents=True, exist_ok=True)
    memory, host = card.memory(work.moved_bytes), card.pinned(work.moved_bytes)
    to_gpu: list[Figure] = []
    from_gpu: list[Figure] = []
    with Serving(folder, dram=str(4 * work.moved_bytes)) as serving:
        for page_bytes in work.page_sizes:
            with serving.connect(timeout_s=PATIENCE_S) as client:
                pages = _PinnedPages(client, memory, page_bytes)
                pages.make_ready()
                for name, ours, to_device in (
                    (f"GPU to pinned DRAM, pages of {page_bytes >> 10} KiB", pages.store, False),
                    (f"pinned DRAM to GPU, pages of {page_bytes >> 10} KiB", pages.load, True),
                ):
                    limit = _copying(card, memory, host, to_device=to_device)
                    figure = Figure.of_speed(
                        name, work.moved_bytes, alternate(work.rounds, ours, limit), _LIMIT
                    )
                    (to_gpu if to_device else from_gpu).append(figure)
                client.clear(pages.space)
    return outcome_of(to_gpu, from_gpu)


def outcome_of(to_gpu: Sequence[Figure], from_gpu: Sequence[Figure]) -> PartOutcome:
    """The slowest size is judged, each way; all are shown."""
    judged = [_judged(TO_GPU, to_gpu), _judged(FROM_GPU, from_gpu)]
    return PartOutcome("pinned", [*judged, *to_gpu, *from_gpu])


def _judged(name: str, figures: Sequence[Figure]) -> Figure:
    worst = min(figures, key=lambda figure: figure.ratio or 0.0)
    return Figure(
        name, worst.value, worst.unit, worst.limit, _LIMIT, _GOAL, worst.ratio, worst.ratio_spread
    )


def _copying(card: Card, memory: Memory, host: Any, *, to_device: bool) -> Any:
    return lambda: timed(lambda: card.copy(memory, host, to_device=to_device))


class _PinnedPages(DevicePages):
    def make_ready(self) -> None:
        """The kernels are compiled and the whole arena is registered: what happens once."""
        self.store()
        self.load()
        eventually(lambda: self.native.registration()[1], "the arena is registered with CUDA")
