"""Where the requests of a drive come from: a trace in memory, or a workload as it is made."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from kvwarehouse.trace.trace import Trace
from kvwarehouse.workloads.call import Call


def calls_of(trace: Trace, *, again: bool = False) -> Iterator[Call]:
    """Its requests; with `again` without end, each time through with block ids of its own, so that
    nothing is hit that an earlier time has left."""
    for passed in count() if again else (0,):
        # A moment apart, as if the last request were followed by one more of the same gap.
        shift_s = passed * (trace.span_s + trace.span_s / max(1, trace.requests - 1))
        begin = 0
        for at in range(trace.requests):
            end = int(trace.ends[at])
            blocks = trace.pages[begin:end].astype(object) + passed * trace.ids
            yield Call(
                float(trace.times_s[at]) + shift_s,
                int(trace.input_tokens[at]),
                int(trace.output_tokens[at]),
                blocks.tolist(),
                at,
            )
            begin = end
