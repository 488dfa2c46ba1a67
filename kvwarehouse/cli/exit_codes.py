"""What the process's exit status says. Stable: scripts match on it."""

from enum import IntEnum
from typing import Final

from kvwarehouse.errors import TransportError, UsageError, WarehouseError


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    NO_DAEMON = 3
    FOUND = 4
    REPAIRED = 5
    INTERRUPTED = 130
    NO_READER = 141  # 128 + SIGPIPE, as of commands that die of it


MEANINGS: dict[Exit, str] = {
    Exit.OK: "done",
    Exit.FAILED: "refused or broken; the message says what and what to do",
    Exit.USAGE: "wrong arguments or settings",
    Exit.NO_DAEMON: "no daemon or store there, or it did not answer in time",
    Exit.FOUND: "done, and the answer is bad news: damaged pages, a flush that is not through,"
    " requests that failed, a clear that other hosts do not know of, nothing that could be kept",
    Exit.REPAIRED: "done, and damaged pages were found, none of which is left",
    Exit.INTERRUPTED: "interrupted",
    Exit.NO_READER: "whoever read the output was gone before its end; what it came to is not known",
}


# Of a daemon that does not start: it asked nobody, its own address is taken.
_OWN_ADDRESS: Final = frozenset({"address_unavailable", "socket_foreign", "socket_in_use"})


def exit_code_of(error: WarehouseError) -> Exit:
    if isinstance(error, UsageError):
        return Exit.USAGE
    if error.code in _OWN_ADDRESS:
        return Exit.FAILED
    return Exit.NO_DAEMON if isinstance(error, TransportError) else Exit.FAILED
