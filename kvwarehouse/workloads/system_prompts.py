"""Calls of programs, as Alibaba's to-B trace has them: nearly all of one turn, many sharing the
system prompt of their application, some the material of a task that is called for again within
seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvwarehouse.workloads.call import Call, Ids, blocks_in
from kvwarehouse.workloads.draws import Draws, Popularity, QuantileCurve
from kvwarehouse.workloads.pool import Pool


@dataclass(frozen=True)
class Shape:
    """`again` is how often a call is followed by another one of its task, `talk` how often that one
    goes on with the whole prompt before it (a second turn)."""

    applications: int
    skew: float
    system: QuantileCurve
    material: QuantileCurve
    own: QuantileCurve
    outputs: QuantileCurve
    gaps_s: QuantileCurve
    again: float
    talk: float


TO_BUSINESS = Shape(
    applications=300,
    skew=0.836,
    system=QuantileCurve([(0.5, 364), (0.9, 910)], least=32, most=8_000),
    material=QuantileCurve([(0.5, 538), (0.9, 2_150)], least=16, most=16_000),
    own=QuantileCurve([(0.5, 96), (0.9, 385)], least=16, most=16_000),
    outputs=QuantileCurve([(0.5, 69), (0.99, 769)], least=1, most=2_048),
    gaps_s=QuantileCurve([(0.5, 1.16), (0.9, 16.7)], most=600),
    again=0.42,
    talk=0.04,
)


@dataclass
class _Task:
    """The blocks that the next call begins with; `last` is the call that it answers, -1 where it is
    a call of its own."""

    blocks: list[int]
    last: int = -1
    turn: int = 1


@dataclass(frozen=True)
class SystemPrompts:
    seed: int
    shape: Shape
    requests_per_s: float
    block_tokens: int = 16

    def calls(self) -> Iterator[Call]:
        shape, draws, ids = self.shape, Draws(self.seed, "system-prompts"), Ids()
        pool: Pool[_Task] = Pool(draws, self.requests_per_s)
        popularity = Popularity(shape.applications, shape.skew)
        systems = [ids.take(self._blocks(shape.system, draws)) for _ in range(shape.applications)]
        for chat, (time_s, due) in enumerate(pool.arrivals()):
            task = due
            if task is None:
                system = systems[popularity.draw(draws)]
                task = _Task(system + ids.take(self._blocks(shape.material, draws)))
            own = max(1, int(shape.own.draw(draws)))
            blocks = task.blocks + ids.take(blocks_in(own, self.block_tokens))
            tokens = len(task.blocks) * self.block_tokens + own
            output = int(shape.outputs.draw(draws))
            yield Call(time_s, tokens, output, blocks, chat, task.last, task.turn)
            if draws.chance(shape.again):
                talks = draws.chance(shape.talk)
                full = tokens // self.block_tokens
                after = _Task(blocks[:full], chat, task.turn + 1) if talks else _Task(task.blocks)
                pool.add(time_s + shape.gaps_s.draw(draws), after)

    def _blocks(self, lengths: QuantileCurve, draws: Draws) -> int:
        return max(1, round(lengths.draw(draws) / self.block_tokens))
