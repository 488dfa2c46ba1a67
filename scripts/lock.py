"""Pins every version of every environment: writes requirements/NAME.txt from pyproject.toml and
requirements/environments.toml.

    lock.py [NAME ...]            changes as little as the ranges allow; all environments by
                                  default
    lock.py --upgrade [NAME ...]  takes the newest versions that the ranges allow
    lock.py --check               says whether a lock was made from other ranges; asks nobody

A lock holds for Python 3.11 and newer, on any Linux. torch is in none of them: see [torch] there.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from environments import Environment, SetupError, environments, run, uv

_LOWEST_PYTHON = "3.11"
_INPUTS = "# Made by `make lock`; inputs: "


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--upgrade", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(arguments)
    known = environments()
    chosen = [known[name] for name in args.names or known]
    if args.check:
        return _check(chosen)
    for environment in chosen:
        print(f"lock: {environment.name}", flush=True)
        _write(environment, environment.lock, upgrade=args.upgrade)
    return 0


def write_latest(environment: Environment, folder: Path) -> Path:
    """A lock of the newest that the ranges allow, of engines too: what is pinned in
    environments.toml is free there."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / environment.lock.name
    fields = {**vars(environment)}
    for name in ("packages", "alone"):
        fields[name] = [re.sub(r"==[^;,]*", "", package) for package in fields[name]]
    _write(Environment(**fields), lock, upgrade=True)
    return lock


def _write(environment: Environment, lock: Path, *, upgrade: bool) -> None:
    together = _resolve(environment, environment.requirements(), lock, upgrade)
    alone = _resolve(environment, environment.requirements_alone(), lock, upgrade, "--no-deps")
    lock.write_text(f"{_INPUTS}{_digest(environment)}\n{together}{alone}", encoding="utf-8")


def _resolve(
    environment: Environment, requirements: Sequence[str], lock: Path, upgrade: bool, *flags: str
) -> str:
    if not requirements:
        return ""
    with tempfile.TemporaryDirectory() as scratch:
        wanted, excluded, found = (Path(scratch) / name for name in ("in", "excluded", "out"))
        wanted.write_text("\n".join(requirements))
        excluded.write_text("\n".join(environment.excluded()))
        if lock.exists() and not upgrade:
            found.write_text(lock.read_text("utf-8"), encoding="utf-8")  # uv keeps what is there
        run(
            [
                uv(), "pip", "compile", "--quiet", wanted, "--output-file", found,
                "--universal", "--python-version", _LOWEST_PYTHON, "--excludes", excluded,
                "--resolution", "lowest-direct" if environment.lowest else "highest",
                "--no-header", "--no-annotate", *(["--upgrade"] if upgrade else []), *flags,
            ]
        )  # fmt: skip
        return found.read_text("utf-8")


def _digest(environment: Environment) -> str:
    wanted = [
        _LOWEST_PYTHON,
        str(environment.lowest),
        *environment.requirements(),
        *environment.requirements_alone(),
        *environment.excluded(),
    ]
    return hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:16]


def _check(chosen: Sequence[Environment]) -> int:
    stale = [
        each.name
        for each in chosen
        if not each.lock.exists()
        or each.lock.read_text("utf-8").partition("\n")[0] != f"{_INPUTS}{_digest(each)}"
    ]
    if stale:
        print(
            f"requirements/ of {', '.join(stale)} are not what pyproject.toml and "
            "environments.toml say now: make lock",
            file=sys.stderr,
        )
    return bool(stale)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SetupError as error:
        sys.exit(f"lock: {error}")
