"""Runs clang-tidy over the sources of a build, and remembers which are clean.

    run_clang_tidy.py BUILD_FOLDER [--jobs N]

A source is looked at again when it, a header of ours that it includes at any depth, its compile
command, .clang-tidy or the environment of the lint tools has changed. What is clean is remembered
beside the environments that clones share; a source with findings is not. Exit status 1 where there
are findings.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
_INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_COUNTS = re.compile(r"^\d+ warnings?( and \d+ errors?)? (generated|treated)|^\[\d+/")
_KEPT_DAYS = 30


@dataclass(frozen=True)
class Source:
    path: Path
    key: str
    """Of all that clang-tidy's findings follow from; one where any of it differs has another."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("build", type=Path, help="the folder with compile_commands.json")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    clean = _clean_folder()
    sources = _sources(args.build)
    waiting = [source for source in sources if not _is_clean(clean / source.key)]
    print(f"clang-tidy: {len(waiting)} of {len(sources)} sources to look at", flush=True)
    failed = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for source, output in pool.map(lambda each: (each, _findings(args.build, each)), waiting):
            if output:
                print(output, file=sys.stderr, flush=True)
                failed += 1
            else:
                (clean / source.key).touch()
    _forget(clean)
    return int(failed > 0)


def _sources(build: Path) -> list[Source]:
    """Those of the build; sources for other processors are not among them."""
    commands: dict[Path, list[str]] = {}
    for entry in json.loads((build / "compile_commands.json").read_text("utf-8")):
        path = Path(entry["file"])
        if path.is_relative_to(NATIVE):
            commands.setdefault(path, []).append(entry["command"].replace(str(ROOT), ""))
    rules = (ROOT / ".clang-tidy").read_bytes()
    tools = (ROOT / "requirements" / "lint.txt").read_bytes()
    found = []
    for path, ways in sorted(commands.items()):
        digest = hashlib.sha256()
        for part in (rules, tools, _compiler(ways[0]), *map(str.encode, ways), *_texts(path)):
            digest.update(hashlib.sha256(part).digest())
        found.append(Source(path, digest.hexdigest()))
    return found


@cache
def _compiler_version(compiler: str) -> bytes:
    """Its headers are read too."""
    return subprocess.run([compiler, "-v"], stderr=subprocess.PIPE, check=True).stderr


def _compiler(command: str) -> bytes:
    return _compiler_version(shlex.split(command)[0])


def _texts(path: Path) -> list[bytes]:
    """Names and contents of a source and of what it includes of ours."""
    seen: dict[Path, bytes] = {}
    waiting = [path]
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen[each], included = _read(each)
            waiting += included
    return [
        part for each in sorted(seen) for part in (str(each.relative_to(ROOT)).encode(), seen[each])
    ]


@cache
def _read(path: Path) -> tuple[bytes, list[Path]]:
    text = path.read_bytes()
    places = [
        (NATIVE / name, path.parent / name) for name in map(os.fsdecode, _INCLUDE.findall(text))
    ]
    return text, [place.resolve() for pair in places for place in pair if place.is_file()]


def _findings(build: Path, source: Source) -> str:
    program = Path(sys.executable).parent / "clang-tidy"
    done = subprocess.run(
        [program, "-p", build, "--quiet", source.path],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if not _COUNTS.match(line)]
    return "\n".join(lines) or f"clang-tidy: {source.path}: exit status {done.returncode}"


def _clean_folder() -> Path:
    cache_home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(cache_home) / "kvwarehouse" / "clang-tidy"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _is_clean(mark: Path) -> bool:
    if not mark.exists():
        return False
    mark.touch()
    return True


def _forget(clean: Path) -> None:
    oldest = time.time() - _KEPT_DAYS * 86_400
    for mark in clean.iterdir():
        if mark.stat().st_mtime < oldest:
            mark.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
