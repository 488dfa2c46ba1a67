"""The commands that repeat failed Python tests: a call of make with the run's seed and the tests'
names, which tests/conftest.py prints under a run and understands.

Stateless; thread-safe.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Final

from testkit.tally import ROUNDS

_LANES: Final = {
    f"tests/engines/{name}": f"test-{name}"
    for name in ("dynamo", "lmcache", "sglang", "transformers", "trtllm", "vllm")
} | {"tests/gpu": "test-gpu", "tests/site": "test-docs", "tests": "test-python"}
"""The target of make that runs the tests of a folder; the first that fits."""
_SCALES: Final = (ROUNDS, "KVW_TEST_EXAMPLES", "KVW_TEST_STEPS")
"""What a run may have been scaled by."""
MOST_NAMED: Final = 20
"""With more failures than these, a command names files."""


def commands(failed: Iterable[str], seed: int, environment: Mapping[str, str]) -> list[str]:
    """One for each target of make, of pytest's names of the tests that failed in it. environment:
    the run's."""
    lanes: dict[str, list[str]] = {}
    for name in dict.fromkeys(failed):
        lanes.setdefault(_lane(name), []).append(name)
    settings = [f"KVW_SEED={seed}"]
    settings += [f"{name}={environment[name]}" for name in _SCALES if name in environment]
    return [
        " ".join([*settings, "make", lane, f'ARGS="{_arguments(lane, names)}"'])
        for lane, names in lanes.items()
    ]


def looked_into(ignored: Iterable[str], arguments: Iterable[str]) -> list[str]:
    """`ignored` without the paths that lead to a chosen file or test."""
    named = [_path(each) for each in arguments if _path(each).suffix == ".py"]
    return [
        each for each in ignored if not any(_path(each) in (path, *path.parents) for path in named)
    ]


def _path(argument: str) -> PurePath:
    return PurePath(os.path.abspath(argument.partition("::")[0]))


def _lane(name: str) -> str:
    return next((lane for folder, lane in _LANES.items() if name.startswith(f"{folder}/")), "test")


def _arguments(lane: str, names: list[str]) -> str:
    """In double quotes of a shell and expanded by make, then words of a shell again."""
    if len(names) > MOST_NAMED:
        names = list(dict.fromkeys(name.partition("::")[0] for name in names))
    # The other lanes run in one process anyway, and their environments need no pytest-xdist.
    words = ["-n 0"] if lane == "test-python" else []
    given = " ".join([*words, *map(shlex.quote, names)]).replace("$", "$$")
    for special in '\\"$`':
        given = given.replace(special, f"\\{special}")
    return given
