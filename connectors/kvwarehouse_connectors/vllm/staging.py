"""How much memory a worker takes for pages on their way out, where no setting says it.

A step may fill half of it, while the other half is on its way. Of a prompt whose last step fills
more, a part is stored later, or never: full attention until the request ends, windows not at all.
So the memory follows from the largest step. Stateless; imports no engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvwarehouse_connectors.core.groups import CacheGroup

LEAST_BYTES = 256 << 20
MOST_BYTES = 2 << 30
# Of the memory that the copies are in. Engines leave a tenth of a GPU's beside their cache. What is
# sold as 80 GB may be 79.6 GiB, and is to have MOST_BYTES.
_SHARE = 36


def needed_bytes(groups: Sequence[CacheGroup], block_bytes: Sequence[int], step_tokens: int) -> int:
    """For a prompt that is computed in one step of step_tokens to be found afterwards: full
    attention, and of other groups what computing on reads, as the planner takes them."""
    align = math.lcm(*(group.block_tokens for group in groups))
    end = -(-step_tokens // align) * align
    return 2 * sum(
        (end // group.block_tokens - group.first_needed(end - align)) * size
        for group, size in zip(groups, block_bytes, strict=True)
    )


def usual_bytes(needed: int, memory_bytes: int) -> int:
    """As much as is needed, within bounds. memory_bytes: all of the memory that it is a part of."""
    return max(LEAST_BYTES, min(needed, MOST_BYTES, memory_bytes // _SHARE))
