"""Conversations as public traces have them, and whose turn is next. Not thread-safe.

Requests arrive as a Poisson process, as in the public traces; each one goes on with the
conversation that has waited longest for its turn, and begins a new one where none is due. So the
rate is steady from the first second, and what is in memory is the conversations that go on.

Chat is what Mooncake published: a root block that all share, trees of turns beneath it. The turns
of a conversation are as many draws of the one distribution of input lengths, in rising order: a
conversation grows, and all requests together have the published lengths. `alike` says how near the
draws of one conversation are to each other.

SystemPrompts are calls of programs, as Alibaba's to-B trace has them: nearly all of one turn, many
sharing the system prompt of their application, some the material of a task that is called for again
within seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvwarehouse.workloads.call import Ids, WorkloadCall, blocks_in
from kvwarehouse.workloads.draws import Draws, Popularity, QuantileCurve

_T = TypeVar("_T")

# Published of the synthetic trace alone, and taken for both. The gaps between turns below are those
# that make the published gaps between uses of a block, in a trace of the published length.
_OUTPUTS = QuantileCurve([(0.5, 69), (0.99, 769)], least=1, most=2048)


class ConversationPool(Generic[_T]):
    def __init__(self, draws: Draws, requests_per_s: float) -> None:
        self._draws = draws
        self._mean_s = 1 / requests_per_s
        self._due: list[tuple[float, int, _T]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._due)

    def arrivals(self) -> Iterator[tuple[float, _T | None]]:
        """Without end: the time, and what is due then, None for something new."""
        time_s = 0.0
        while True:
            time_s += self._draws.wait(self._mean_s)
            due = self._due
            yield time_s, heapq.heappop(due)[2] if due and due[0][0] <= time_s else None

    def add(self, due_s: float, conversation: _T) -> None:
        self._added += 1
        heapq.heappush(self._due, (due_s, self._added, conversation))


@dataclass(frozen=True)
class Profile:
    """What one published trace is like. `single` is the part of conversations with one turn; the
    others have 2, and one more with probability `go_on`. `branch` is how often a turn goes on from
    an earlier one than the last."""

    lengths: QuantileCurve
    outputs: QuantileCurve
    gaps_s: QuantileCurve
    requests_per_s: float
    single: float
    go_on: float
    most_turns: int
    alike: float
    branch: float
    root: bool


PROFILES = {
    # Lengths a little above the published 6,900 and 85,000: the last turns of conversations, their
    # longest, are missing where a trace ends.
    "conversation": Profile(
        lengths=QuantileCurve([(0.5, 7_150), (0.99, 86_500)], least=600, most=128_000),
        outputs=_OUTPUTS,
        gaps_s=QuantileCurve([(0.1, 4.1), (0.5, 59.6), (0.9, 285)], most=3600),
        requests_per_s=3.9,
        single=0.458,
        go_on=0.653,
        most_turns=40,
        alike=0.0,
        branch=0.1,
        root=True,
    ),
    "synthetic": Profile(
        lengths=QuantileCurve(
            [(0.05, 100), (0.5, 11_587), (0.9, 38_615), (0.99, 66_458), (0.9998, 191_378)],
            least=13,
            most=191_378,
        ),
        outputs=_OUTPUTS,
        gaps_s=QuantileCurve([(0.1, 6.52), (0.5, 101.3), (0.9, 287)], most=3600),
        requests_per_s=3.9,
        single=0.5226,
        go_on=0.937,
        most_turns=24,
        alike=0.9892,
        branch=0.0,
        root=False,
    ),
}


@dataclass
class _Conversation:
    """`turns`: chat number and full blocks of each so far. `lengths` are those to come, the next
    one last."""

    lengths: list[int]
    turns: list[tuple[int, list[int]]] = field(default_factory=list)


@dataclass(frozen=True)
class Chat:
    seed: int
    profile: Profile
    requests_per_s: float
    block_tokens: int = 512

    def calls(self) -> Iterator[WorkloadCall]:
        draws, ids = Draws(self.seed, "chat"), Ids()
        pool: ConversationPool[_Conversation] = ConversationPool(draws, self.requests_per_s)
        root = ids.take(1) if self.profile.root else []
        for chat, (time_s, due) in enumerate(pool.arrivals()):
            conversation = due or _Conversation(self._lengths(draws))
            yield self._turn(conversation, time_s, chat, root, (draws, ids))
            if conversation.lengths:
                pool.add(time_s + self.profile.gaps_s.draw(draws), conversation)

    def _lengths(self, draws: Draws) -> list[int]:
        """Of all turns of a new conversation, the longest first."""
        profile = self.profile
        turns = 1
        if not draws.chance(profile.single):
            turns += draws.times(profile.go_on, profile.most_turns - 1)
        common, own = profile.alike**0.5, (1 - profile.alike) ** 0.5
        shared = draws.normal()
        scores = sorted(
            (common * shared + own * draws.normal() for _ in range(turns)), reverse=True
        )
        return [int(profile.lengths.at(score)) for score in scores]

    def _turn(
        self,
        conversation: _Conversation,
        time_s: float,
        chat: int,
        root: list[int],
        sources: tuple[Draws, Ids],
    ) -> WorkloadCall:
        draws, ids = sources
        length = conversation.lengths.pop()
        parent, known = -1, root
        if conversation.turns:
            back = 1
            if draws.chance(self.profile.branch):
                back += draws.below(len(conversation.turns))
            parent, known = conversation.turns[-back]
        full = length // self.block_tokens
        blocks = known[:full] + ids.take(max(0, full - len(known)))
        if conversation.lengths:
            conversation.turns.append((chat, blocks))
        tail = ids.take(blocks_in(length, self.block_tokens) - full)
        output = int(self.profile.outputs.draw(draws))
        turn = len(conversation.turns) + (not conversation.lengths)
        return WorkloadCall(time_s, length, output, blocks + tail, chat, parent, turn)


@dataclass(frozen=True)
class SystemPromptShape:
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


TO_BUSINESS = SystemPromptShape(
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
    shape: SystemPromptShape
    requests_per_s: float
    block_tokens: int = 16

    def calls(self) -> Iterator[WorkloadCall]:
        shape, draws, ids = self.shape, Draws(self.seed, "system-prompts"), Ids()
        pool: ConversationPool[_Task] = ConversationPool(draws, self.requests_per_s)
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
            yield WorkloadCall(time_s, tokens, output, blocks, chat, task.last, task.turn)
            if draws.chance(shape.again):
                talks = draws.chance(shape.talk)
                full = tokens // self.block_tokens
                after = _Task(blocks[:full], chat, task.turn + 1) if talks else _Task(task.blocks)
                pool.add(time_s + shape.gaps_s.draw(draws), after)

    def _blocks(self, lengths: QuantileCurve, draws: Draws) -> int:
        return max(1, round(lengths.draw(draws) / self.block_tokens))
