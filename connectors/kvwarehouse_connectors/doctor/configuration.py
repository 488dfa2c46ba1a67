"""Reads the engine's own configuration, as the engine is given it: JSON, or a file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from kvwarehouse_connectors.doctor.facts import ConfigFacts


def config_facts(text: str) -> ConfigFacts:
    """text: an object in JSON, or the path of a file (SGLang begins it with "@") in JSON, YAML or
    TOML, by its name; "" for none."""
    if not text:
        return ConfigFacts()
    try:
        found = json.loads(text) if text.lstrip().startswith("{") else _of_file(text)
    except _UnreadableError as error:
        return ConfigFacts(given=True, error=str(error))
    except ValueError as error:
        return ConfigFacts(given=True, error=f"not JSON: {error}")
    if not isinstance(found, dict):
        return ConfigFacts(given=True, error=f"has {type(found).__name__}, not names with values")
    return ConfigFacts(given=True, values=found)


class _UnreadableError(Exception):
    """In words."""


def _of_file(text: str) -> Any:
    path = Path(text.removeprefix("@"))
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise _UnreadableError(
            f"{text!r} is neither an object in JSON nor a file {', '.join(sorted(_PARSERS))}"
        )
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _UnreadableError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # JSON, TOML and text that is not UTF-8
        raise _UnreadableError(f"{path}: {error}") from None


def _yaml(text: str) -> Any:
    """With the engine's own package for it."""
    try:
        yaml = import_module("yaml")
    except ImportError:
        raise _UnreadableError(
            "this environment has no PyYAML to read it: is it the engine's?"
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _UnreadableError(f"not YAML: {error}") from None


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
}
