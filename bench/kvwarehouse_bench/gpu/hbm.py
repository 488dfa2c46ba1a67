"""Pages from the HBM tier to a cache in the same GPU, scattered over it, beside one large copy in
the device; and beside the same scatter without a digest, for the digest's share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvwarehouse_bench.gpu.device_pages import PATIENCE_S, Card, DevicePages
from kvwarehouse_bench.gpu.goals import DIGEST, HBM, PartOutcome
from kvwarehouse_bench.harness.alternation import Rounds, in_turns, timed
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_bench.micro.figures import Figure

_LIMIT = "one copy in the device"
_GOAL, _DIGEST_GOAL = "ratio 0.8 or more", "under 5 %"
_SIZES = (1 << 20, 2 << 20, 8 << 20)


@dataclass(frozen=True)
class HbmWork:
    moved_bytes: int = 1 << 30
    """By each side of a round."""
    page_sizes: Sequence[int] = _SIZES
    rounds: int = 7


@dataclass(frozen=True)
class HbmSample:
    page_bytes: int
    moved_bytes: int
    load_s: Sequence[float]
    copy_s: Sequence[float]
    scatter_s: Sequence[float]


def hbm(
    card: Card, folder: Path, work: HbmWork, environment: Mapping[str, str] | None = None
) -> PartOutcome:
    """environment: of the daemon, beside that of this process. Blocks for some minutes. Raises
    RuntimeError where pages did not come whole, or not from HBM."""
    folder.mkdir(parents=True, exist_ok=True)
    memory, source = card.memory(work.moved_bytes), card.memory(work.moved_bytes)
    samples = []
    tiers = {"dram": str(4 * work.moved_bytes), "hbm": str(2 * work.moved_bytes)}
    daemon = Serving(folder, **tiers)
    daemon.environment.update(environment or {})
    with daemon as serving:
        for page_bytes in work.page_sizes:
            with serving.connect(timeout_s=PATIENCE_S) as client:
                pages = _HbmPages(client, memory, page_bytes)
                pages.make_hot()
                sides: list[Callable[[], float]] = [
                    pages.load,
                    partial(timed, partial(card.copy_within, memory, source)),
                    partial(
                        timed,
                        partial(card.scatter_within, memory, source, page_bytes, pages.order),
                    ),
                ]
                samples.append(
                    HbmSample(page_bytes, work.moved_bytes, *in_turns(work.rounds, sides))
                )
                client.clear(pages.space)
    return outcome_of(samples)


def outcome_of(samples: Sequence[HbmSample]) -> PartOutcome:
    """The slowest size is judged, and the one in which the digest takes the most."""
    loads = [
        Figure.of_speed(
            f"HBM to the same GPU, pages of {each.page_bytes >> 10} KiB",
            each.moved_bytes,
            Rounds(each.load_s, each.copy_s),
            _LIMIT,
        )
        for each in samples
    ]
    worst = min(loads, key=lambda figure: figure.ratio or 0.0)
    judged = Figure(
        HBM, worst.value, worst.unit, worst.limit, _LIMIT, _GOAL, worst.ratio, worst.ratio_spread
    )
    share = Figure(DIGEST, max(map(_share, samples)), "%", goal=_DIGEST_GOAL)
    return PartOutcome("hbm", [judged, share, *loads])


def _share(sample: HbmSample) -> float:
    """At most: what a load takes beyond the same scatter by somebody who digests nothing."""
    pairs = zip(sample.load_s, sample.scatter_s, strict=True)
    return 100 * max(0.0, statistics.median((load - scatter) / load for load, scatter in pairs))


class _HbmPages(DevicePages):
    def make_hot(self) -> None:
        """Stored from the device, and loaded until all of it comes from HBM."""
        eventually(self._serves, "the HBM tier is there")
        self.store()
        eventually(self._all_from_hbm, "all pages come from HBM", deadline_s=PATIENCE_S)

    def load(self) -> float:
        before = self._from_hbm()
        took = super().load()
        found = self._from_hbm() - before
        if found != self.count:
            raise RuntimeError(f"{found} of {self.count} pages came from HBM")
        return took

    def _serves(self) -> bool:
        tier = self.client.status()["core"]["tiers"]["hbm"]
        if tier["health"] == "failed":
            raise RuntimeError(f"no HBM tier: {tier['reason']}")
        return bool(tier["health"] == "ok")

    def _all_from_hbm(self) -> bool:
        try:
            return self.load() > 0
        except RuntimeError:
            return False

    def _from_hbm(self) -> int:
        return int(self.native.counters()["pages_loaded_hbm"])
