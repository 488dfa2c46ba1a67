"""The environment of a test run, without what whoever runs it has set for work of their own."""

from __future__ import annotations

import os
import resource
from typing import Final

from kvwarehouse import config

_OF_DAEMONS_AND_COMMANDS: Final = (
    *config._variables(), "KVW_ADDRESS", "KVW_CONFIG", "KVW_DAEMON_UID", "KVW_TOKEN",
    "KVW_SOAK_MINUTES",
)  # fmt: skip
"""A test's daemon would open the disks of the warehouse that they use."""

_OF_TERMINALS: Final = (
    "FORCE_COLOR", "NO_COLOR", "PY_COLORS", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES",
)  # fmt: skip

_OF_GIT: Final = ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE")
"""A hook has them; a test's repository would be the one that the hook is of."""

_HERE: Final = ("127.0.0.1", "localhost", "::1")

_DESCRIPTORS: Final = 65_536
"""A process of a test has hundreds of sessions; shells let it have 1,024 descriptors."""


def take() -> None:
    """For this process and those that it starts."""
    for name in (*_OF_DAEMONS_AND_COMMANDS, *_OF_TERMINALS, *_OF_GIT):
        os.environ.pop(name, None)
    for name in ("no_proxy", "NO_PROXY"):  # a proxy leads elsewhere than to servers of tests
        known = filter(None, [os.environ.get(name)])
        os.environ[name] = ",".join([*known, *_HERE])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
