"""Agentic sessions as the AgentX traces have them: a prompt that grows turn by turn, is cut back
when it reaches the model's window, and sends out sub-agents with prompts of their own.

A session is made whole, a few megabytes; ids are its own, from 0 ("local" in WEKA's format).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvwarehouse.workloads.call import Ids, WorkloadCall, blocks_in
from kvwarehouse.workloads.draws import Draws, QuantileCurve

# Means 80.2 requests and reaches 1,178 among 739 sessions, as published.
_REQUESTS = QuantileCurve([(0.5, 48.6), (0.841, 131.2)], least=1, most=1_178)
MEAN_REQUESTS = 80.2
_TOKENS_PER_S = 60
_PREFILL_TOKENS_PER_S = 20_000
MOST_THINK_S = 10.0


@dataclass(frozen=True)
class Variant:
    """`keeps` is the part of a full prompt behind the system prompt that survives a cut: as a
    summary or as its newest messages, in both cases as new KV, because what stands before it has
    changed. `fan_out` is how often a turn sends out sub-agents."""

    window_tokens: int
    keeps: float
    growth: QuantileCurve
    fan_out: float = 0.06


VARIANTS = {
    "cached": Variant(
        200_000, 0.1, QuantileCurve([(0.5, 400), (0.9, 2_000)], least=32, most=40_000)
    ),
    "truncated": Variant(
        131_072, 0.94, QuantileCurve([(0.5, 2_500), (0.9, 15_000)], least=32, most=60_000)
    ),
}

_SYSTEM = QuantileCurve([(0.5, 3_000), (0.9, 6_000)], least=500, most=16_000)
_TOOLS = QuantileCurve([(0.5, 9_000), (0.9, 20_000)], least=1_000, most=40_000)
_OUTPUTS = QuantileCurve([(0.5, 250), (0.9, 1_200)], least=1, most=8_000)
_THINK_S = QuantileCurve([(0.5, 1.0), (0.9, 8.0)], most=MOST_THINK_S)
_TASK = QuantileCurve([(0.5, 800), (0.9, 4_000)], least=32, most=20_000)


@dataclass(frozen=True)
class AgentCall:
    """`call.time_s` is since the session began. `sent` are the sub-agents that follow it."""

    call: WorkloadCall
    api_s: float
    think_s: float
    sent: list[SubAgent] = field(default_factory=list)


@dataclass(frozen=True)
class SubAgent:
    kind: str
    calls: list[AgentCall]


@dataclass(frozen=True)
class AgentSession:
    number: int
    block_tokens: int
    system_tokens: int
    tool_tokens: int
    calls: list[AgentCall]

    def flat(self) -> list[WorkloadCall]:
        """Those of sub-agents too, in the order of time."""
        every = [sub.call for each in self.calls for sent in each.sent for sub in sent.calls]
        return sorted([each.call for each in self.calls] + every, key=lambda call: call.time_s)


@dataclass(frozen=True)
class Agents:
    seed: int
    variant: Variant
    requests_per_s: float
    block_tokens: int = 64

    def sessions(self) -> Iterator[AgentSession]:
        """Without end. Each has draws of its own, so one more request in one changes no other."""
        number = 0
        while True:
            yield _Maker(self, number).session()
            number += 1

    def calls(self) -> Iterator[WorkloadCall]:
        """All sessions in the order of time, ids told apart; sessions begin as a Poisson process
        that makes `requests_per_s` on the average."""
        starts = Draws(self.seed, "agents")
        under_way: list[tuple[float, int, int, list[WorkloadCall]]] = []
        time_s, ids, chat = 0.0, 0, 0
        for session in self.sessions():
            time_s += starts.wait(MEAN_REQUESTS / self.requests_per_s)
            while under_way and under_way[0][0] <= time_s:
                yield replace(_next_of(under_way), chat=chat)
                chat += 1
            calls = session.flat()
            shifted = [
                replace(call, time_s=time_s + call.time_s, blocks=[ids + b for b in call.blocks])
                for call in reversed(calls)
            ]
            ids += 1 + max(block for call in calls for block in call.blocks)
            heapq.heappush(under_way, (time_s, session.number, 0, shifted))


def _next_of(under_way: list[tuple[float, int, int, list[WorkloadCall]]]) -> WorkloadCall:
    """Takes the earliest request of all."""
    _, number, at, calls = heapq.heappop(under_way)
    call = calls.pop()
    if calls:
        heapq.heappush(under_way, (calls[-1].time_s, number, at + 1, calls))
    return call


@dataclass
class _Context:
    """What an agent's next prompt holds: the blocks that are full, and tokens."""

    blocks: list[int]
    tokens: int


class _Maker:
    """Of one session."""

    def __init__(self, agents: Agents, number: int) -> None:
        self._draws = Draws(agents.seed, f"agents/{number}")
        self._variant = agents.variant
        self._block_tokens = agents.block_tokens
        self._number = number
        self._ids = Ids()
        self._left = int(_REQUESTS.draw(self._draws))
        self._kinds: dict[str, _Context] = {}

    def session(self) -> AgentSession:
        draws = self._draws
        system, tools = int(_SYSTEM.draw(draws)), int(_TOOLS.draw(draws))
        root = self._grown(_Context([], 0), system + tools)
        calls: list[AgentCall] = []
        context, time_s = self._grown(root, int(_TASK.draw(draws))), 0.0
        while self._left > 0:
            made = self._call(context, time_s)
            if self._left > 3 and draws.chance(self._variant.fan_out):
                made = replace(made, sent=self._sent(time_s + made.api_s))
            calls.append(made)
            ends = [time_s + made.api_s, *(_end_s(sent) for sent in made.sent)]
            time_s = max(ends) + made.think_s
            context = self._after(context, root, made.call.output_tokens)
        return AgentSession(self._number, self._block_tokens, system, tools, calls)

    def _sent(self, time_s: float) -> list[SubAgent]:
        """Sub-agents of one kind share their system prompt, in this session and whenever sent."""
        draws, sent = self._draws, []
        for _ in range(draws.times(0.4, 4)):
            kind = ("explore", "plan", "review")[draws.below(3)]
            if kind not in self._kinds:
                tokens = int(_SYSTEM.draw(draws)) + int(_TOOLS.draw(draws)) // 2
                self._kinds[kind] = self._grown(_Context([], 0), tokens)
            root = self._kinds[kind]
            context, calls, at_s = self._grown(root, int(_TASK.draw(draws))), [], time_s
            for _ in range(draws.times(0.9, 40)):
                if self._left <= 1:
                    break
                calls.append(self._call(context, at_s))
                # Nobody thinks between the turns of a sub-agent but its tools.
                at_s += calls[-1].api_s + calls[-1].think_s / 4
                context = self._after(context, root, calls[-1].call.output_tokens)
            if calls:
                sent.append(SubAgent(kind, calls))
        return sent

    def _call(self, context: _Context, time_s: float) -> AgentCall:
        draws = self._draws
        self._left -= 1
        output = int(_OUTPUTS.draw(draws))
        tail = self._ids.take(blocks_in(context.tokens, self._block_tokens) - len(context.blocks))
        call = WorkloadCall(round(time_s, 3), context.tokens, output, context.blocks + tail)
        api_s = output / _TOKENS_PER_S + context.tokens / 20 / _PREFILL_TOKENS_PER_S
        return AgentCall(call, round(api_s, 3), round(_THINK_S.draw(draws), 3))

    def _after(self, context: _Context, root: _Context, output: int) -> _Context:
        """The context of the next turn: the answer and what comes back from tools or the user."""
        grows = output + int(self._variant.growth.draw(self._draws))
        if context.tokens + grows <= self._variant.window_tokens:
            return self._grown(context, grows)
        kept = int((self._variant.window_tokens - root.tokens) * self._variant.keeps)
        return self._grown(root, min(kept, self._variant.window_tokens - root.tokens))

    def _grown(self, context: _Context, tokens: int) -> _Context:
        total = context.tokens + tokens
        full = total // self._block_tokens
        return _Context(context.blocks + self._ids.take(full - len(context.blocks)), total)


def _end_s(sent: SubAgent) -> float:
    last = sent.calls[-1]
    return last.call.time_s + last.api_s
