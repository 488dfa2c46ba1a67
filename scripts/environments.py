"""The virtual environments of requirements/environments.toml, and uv, which fills them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
_NOT_ENVIRONMENTS = ("uv", "torch")


class SetupError(Exception):
    """What a developer has to mend, in words."""


@dataclass(frozen=True)
class Environment:
    """One table of environments.toml, which says what each field means."""

    name: str
    folder: str
    extras: Sequence[str] = ()
    packages: Sequence[str] = ()
    alone: Sequence[str] = ()
    excludes: Sequence[str] = ()
    torch: bool = False
    project: bool = True
    lowest: bool = False
    metadata: str = ""

    @property
    def lock(self) -> Path:
        return REQUIREMENTS / f"{self.name}.txt"

    def requirements(self) -> list[str]:
        """What is resolved together; of torch only what it asks for."""
        wanted = [line for extra in self.extras for line in _extra(extra)]
        return [*wanted, *self.packages, *(_tables()["torch"]["needs"] if self.torch else ())]

    def requirements_alone(self) -> list[str]:
        found = []
        for each in self.alone:
            found += _extra(each.strip("[]")) if each.startswith("[") else [each]
        return found

    def excluded(self) -> list[str]:
        return [*_tables()["torch"]["excludes"], *self.excludes]


def environments() -> dict[str, Environment]:
    return {
        name: Environment(name, **table)
        for name, table in _tables().items()
        if name not in _NOT_ENVIRONMENTS
    }


def torch_package() -> str:
    return str(_tables()["torch"]["package"])


def cache_folder() -> Path:
    """Of what clones share; `make clean-cache` removes it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home).absolute() / "kvwarehouse"


def run(command: Sequence[str | Path], **options: Any) -> None:
    """Raises SetupError with what the command printed where it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options
    )
    if done.returncode != 0:
        words = " ".join(str(word) for word in command)
        raise SetupError(f"{done.stdout}\nthis failed: {words}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time, of all clones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        flock(lock, LOCK_EX)
        yield


@cache
def uv() -> Path:
    """The pinned uv; installed by pip the first time."""
    package = str(_tables()["uv"]["package"])
    folder = cache_folder() / "tools" / f"{package.replace('==', '-')}-{python_tag()}"
    program = folder / "bin" / "uv"
    with locked(folder.with_name(f"{folder.name}.lock")):
        if not (folder / "complete").exists():
            run([sys.executable, "-m", "venv", "--clear", folder])
            run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", package])
            (folder / "complete").touch()
    return program


def python_tag() -> str:
    return f"{sys.implementation.cache_tag}-{os.uname().machine}"


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((REQUIREMENTS / "environments.toml").read_text(encoding="utf-8"))


def _extra(name: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = dict(project["project"]["optional-dependencies"])
    known["build"] = project["build-system"]["requires"]
    known["core"] = project["project"]["dependencies"]
    return list(known[name])
