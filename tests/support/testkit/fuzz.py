"""Runs one of the fuzz targets of fuzz_targets.py, in a process of its own or by a test:

    python -m testkit.fuzz NAME SECONDS FINDINGS CORPUS...

for SECONDS: with atheris where it is installed, guided by coverage, else over inputs that are
changed by a seed alone. FINDINGS is the beginning of the path under which an input is kept that
fails. Stateless.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

_LONGEST: Final = 4096
_NUMBERS: Final = (0, 1, 127, 128, 255, 4095, 4096, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63)


# --- inputs


def read_corpus(folders: Iterable[Path]) -> list[bytes]:
    paths = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path.read_bytes() for path in paths]


def changed(corpus: list[bytes], rng: random.Random) -> bytes:
    """One of the corpus after a few changes."""
    made = bytearray(rng.choice(corpus))
    for _ in range(rng.randint(1, 6)):
        _change(made, corpus, rng)
    return bytes(made[:_LONGEST])


def _change(made: bytearray, corpus: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(made) + 1)
    kind = rng.randrange(7)
    if kind == 0 and made:
        made[at % len(made)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        made[at : at + 1] = rng.randbytes(1)
    elif kind == 2:
        made[at:at] = rng.randbytes(rng.randint(1, 12))
    elif kind == 3:
        del made[at : at + rng.randint(1, 12)]
    elif kind == 4:
        width = rng.choice((1, 2, 4, 8))
        number = (rng.choice(_NUMBERS) + rng.randint(-1, 1)) % 2 ** (8 * width)
        made[at : at + width] = number.to_bytes(width, "little")
    elif kind == 5:
        other = rng.choice(corpus)
        made[at:] = other[rng.randrange(len(other) + 1) :]
    else:
        piece = bytes(made[at : at + rng.randint(1, 40)])
        made[at:at] = piece * rng.choice((1, 2, 50))


# --- the program


def run(name: str, seconds: float, findings: str, corpus: list[bytes]) -> int:
    """Changes of the corpus that follow from KVW_SEED, for `seconds`. Returns how many."""
    from testkit.fuzz_targets import TARGETS

    target, rng = TARGETS[name], random.Random(int(os.environ.get("KVW_SEED", "1"), 0))
    end, runs = time.monotonic() + seconds, 0
    given = iter(corpus)
    while time.monotonic() < end:
        data = next(given, None)
        data = changed(corpus, rng) if data is None else data
        try:
            target(data)
        except BaseException:
            Path(f"{findings}{hashlib.sha1(data).hexdigest()[:12]}").write_bytes(data)
            raise
        runs += 1
    return runs


def _instrument(members: Mapping[str, Any], instrument: Callable[[Any], Any]) -> None:
    for member in list(members.values()):
        if inspect.isfunction(member):
            instrument(member)
        elif inspect.isclass(member) and member.__module__.startswith(("kvwarehouse", "tomllib")):
            for method in vars(member).values():
                if inspect.isfunction(method):
                    instrument(method)


def main(arguments: list[str]) -> int:
    name, seconds, findings, *folders = arguments
    if importlib.util.find_spec("atheris") is None:
        runs = run(name, float(seconds), findings, read_corpus(map(Path, folders)))
        print(f"Done {runs} runs, changed blindly: atheris is not installed")
        return 0
    import atheris

    from testkit.fuzz_targets import TARGETS

    # Not by its import hook: an editable installation's own comes before it.
    for name_of, module in list(sys.modules.items()):
        if name_of.startswith(("kvwarehouse", "tomllib")):
            _instrument(vars(module), atheris.instrument_func)
    options = [f"-max_total_time={seconds}", f"-artifact_prefix={findings}", "-max_len=4096"]
    atheris.Setup([sys.argv[0], *options, *folders], TARGETS[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
