"""SGLang imports Triton and torchvision wherever it runs. Neither is here: the first has no use
without a GPU, the second brings one's libraries. Its scheduler imports what a server needs besides.
Nothing of what is tested calls any of them, so importing them gives modules of names that stand for
nothing.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ABSENT = (
    *("triton", "torchvision"),
    *("einops", "httpx", "openai", "partial_json_parser", "setproctitle", "sniffio", "uvicorn"),
)


def _attribute(name: str, nothing: Any) -> Any:
    if name.startswith("__") or name == "driver":  # Triton's, where there is no GPU
        raise AttributeError(name)
    return nothing


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        return _attribute(name, cls)


class _Nothing(metaclass=_Names):
    """A class, a decorator, a decorator with arguments, a generic: what import statements need."""

    def __new__(cls, *given: Any, **named: Any) -> Any:
        decorated = len(given) == 1 and callable(given[0]) and not named
        return given[0] if decorated else cls

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


class _Module(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - what makes it a package
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        return _attribute(name, _Nothing)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in _ABSENT:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
