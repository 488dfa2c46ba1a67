"""The stores that are compared, and the process of one's client. One owner; not thread-safe."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvwarehouse_bench.harness.process import Exchange, ProgramError

ROOT = Path(__file__).resolve().parents[3]
PEERS_FOLDER = ROOT / ".venv-peers"
LMCACHE_ENVIRONMENT = ROOT / ".venv-lmcache"
VLLM_ENVIRONMENT = ROOT / ".venv-vllm"
MEMORY, DISK = "memory", "disk"
"""Where a store keeps pages in a part of the run."""
_START_S = 120.0
_ANSWER_S = 120.0
_CLOSE_S = 60.0


@dataclass(frozen=True)
class ContenderKind:
    """module: of peers/stores, with the class. environment: None is this one."""

    key: str
    title: str
    module: str
    environment: Path | None = None
    places: Sequence[str] = (MEMORY, DISK)


OURS = ContenderKind("warehouse", "kvwarehouse", "warehouse.WarehouseStore")
PEERS = (
    ContenderKind("files", "one file a page", "files.Files"),
    ContenderKind("lmdb", "LMDB", "lmdb_map.Lmdb"),
    ContenderKind("redis", "Redis", "redis_server.Redis", places=(MEMORY,)),
    ContenderKind(
        "mooncake",
        "Mooncake",
        "mooncake.Mooncake",
        PEERS_FOLDER / "mooncake",
        places=(MEMORY,),
    ),
    ContenderKind("lmcache", "LMCache", "lmcache_inside.LMCacheInside", LMCACHE_ENVIRONMENT),
    ContenderKind(
        "lmcache-server",
        "LMCache server",
        "lmcache_server.LMCacheServer",
        LMCACHE_ENVIRONMENT,
        places=(MEMORY,),
    ),
    ContenderKind(
        "vllm", "vLLM's file tier", "vllm_files.VllmFiles", VLLM_ENVIRONMENT, places=(DISK,)
    ),
)


class ContenderError(ProgramError):
    """A call went wrong; `kind` says whose."""

    def __init__(self, kind: ContenderKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind

    @property
    def reason(self) -> str:
        """The one line that says why: of a traceback its last, without the log behind it."""
        said = str(self).partition("\nthe end of its log:")[0].strip().splitlines()
        last = said[-1] if said else "no reason was given"
        for name in ("CannotRunError: ", "WrongBytesError: "):
            last = last.removeprefix(f"kvwarehouse_bench.peers.store.{name}")
        return last


class Contender:
    """A store's client, started. Whatever goes wrong in it is a ContenderError."""

    def __init__(self, kind: ContenderKind, folder: Path, moved_bytes: int, place: str) -> None:
        self.kind = kind
        home = folder / f"{kind.key}-{os.urandom(4).hex()}"
        data = home / "data"
        data.mkdir(parents=True)
        settings = {
            "store": kind.module,
            "folder": str(data),
            "moved_bytes": moved_bytes,
            "disk": place == DISK,
            "options": {"unpacked": str(PEERS_FOLDER / "redis")},
        }
        program = _interpreter(kind)

        def command(descriptor: int) -> list[str]:
            what = [str(descriptor), json.dumps(settings)]
            return [program, "-P", "-m", "kvwarehouse_bench.peers.client", *what]

        self._exchange = Exchange(command, _environment(home), home, kind.title)
        try:
            self._exchange.start(_START_S)
            self.about: dict[str, Any] = self.call("about")
        except ProgramError as error:
            self._exchange.end()
            raise ContenderError(kind, str(error)) from error
        except BaseException:
            self._exchange.end()
            raise

    @property
    def ways(self) -> list[str]:
        return list(self.about["ways"])

    def call(self, do: str, **arguments: Any) -> Any:
        try:
            return self._exchange.call(do, _ANSWER_S, **arguments)
        except ProgramError as error:
            raise ContenderError(self.kind, str(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._exchange.call("close", _CLOSE_S)
        finally:
            self._exchange.end()


def _interpreter(kind: ContenderKind) -> str:
    if kind.environment is None:
        return sys.executable
    program = kind.environment / "bin" / "python"
    if program.is_file():
        return str(program)
    failed = kind.environment.with_suffix(".failed")
    if failed.is_file():
        why = " ".join(failed.read_text(encoding="utf-8").split())
        raise ContenderError(kind, f"could not be set up: {why}")
    how = "make setup-vllm" if kind.environment == VLLM_ENVIRONMENT else "make setup-peers"
    raise ContenderError(kind, f"not set up, {program.relative_to(ROOT)} is missing: {how}")


def _environment(home: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVW_", "LMCACHE_", "MC_"))}
    return {
        **kept,
        "PYTHONPATH": str(ROOT / "bench"),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(home),
        "TMPDIR": str(home),
    }
