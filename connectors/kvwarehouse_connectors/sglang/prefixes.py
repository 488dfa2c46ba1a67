"""Which prefixes of a prompt can be restored, where a model keeps several kinds of state.

Of some kinds every page of the prefix is needed, of others (windows, states) only the last ones
before its end. Stateless.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def every_page(there: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """there: of each page. Returns, for prefixes of 1, 2, ... pages, whether all theirs are."""
    return np.logical_and.accumulate(there)


def last_pages(there: NDArray[np.bool_], trailing: int) -> NDArray[np.bool_]:
    """As every_page, where only the last `trailing` pages of a prefix are needed, or all of one
    that is shorter."""
    gaps = np.concatenate([[0], np.cumsum(~there)])
    ends = np.arange(1, len(there) + 1)
    good: NDArray[np.bool_] = gaps[ends] == gaps[np.maximum(0, ends - max(1, trailing))]
    return good


def longest(restorable: NDArray[np.bool_]) -> int:
    """Pages of the longest prefix that can be restored; 0 where there is none."""
    found = np.flatnonzero(restorable)
    return int(found[-1]) + 1 if len(found) else 0
