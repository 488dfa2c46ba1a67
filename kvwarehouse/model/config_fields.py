"""A model's config.json as checked numbers: every complaint names the file and the field.

Thread-safe: reads only. A file is read once, at most MOST_BYTES of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvwarehouse.errors import UsageError

MOST_BYTES = 16 * 1024 * 1024
_LARGEST = 2**31


class ConfigFields:
    """The fields of one configuration; `source` is where it came from, for messages."""

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        self._fields = fields
        self.source = source

    def has(self, name: str) -> bool:
        """The field is there and not null."""
        return self._fields.get(name) is not None

    def flag(self, name: str, default: bool) -> bool:
        value = self._fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.bad(name, "text")
        return value

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of `names` that is there. Families call the same number differently."""
        for name in names:
            if not self.has(name):
                continue
            value = self._fields[name]
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.bad(name, "a whole number")
            if not least <= value <= _LARGEST:
                raise self.bad(name, f"{least} to {_LARGEST:,}")
            return value
        if default is None:
            raise UsageError(
                f"{self.source} has no {names[0]}: it is not the config.json of a model that"
                " generates text, or of a family that is not known; give the shape by flags",
                code="bad_model_config",
            )
        return default

    def texts(self, name: str) -> list[str]:
        return [str(each) for each in self._list(name, str, "a list of text")]

    def numbers(self, name: str) -> list[int]:
        return [int(each) for each in self._list(name, int, "a list of whole numbers")]

    def section(self, name: str) -> ConfigFields | None:
        """A nested object, or None where it is not there."""
        if not self.has(name):
            return None
        value = self._fields[name]
        if not isinstance(value, dict):
            raise self.bad(name, "an object")
        return ConfigFields(value, f"{name} of {self.source}")

    def bad(self, name: str, wanted: str) -> UsageError:
        shown = json.dumps(self._fields.get(name), default=str)[:80]
        return UsageError(
            f"{self.source}: {name} is {shown}; it must be {wanted}", code="bad_model_config"
        )

    def _list(self, name: str, kind: type, wanted: str) -> list[Any]:
        value = self._fields.get(name, [])
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise self.bad(name, wanted)
        return value


def read_config(path: str | Path) -> ConfigFields:
    """Of a config.json, or of a folder that has one. Raises UsageError that says what is wrong."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        with file.open("rb") as opened:
            text = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"the model configuration {file} cannot be read: {error.strerror}", code="no_config"
        ) from error
    if len(text) > MOST_BYTES:
        raise UsageError(
            f"{file} is larger than {MOST_BYTES:,} bytes: it is no config.json", code="no_config"
        )
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}", code="bad_model_config") from error
    if not isinstance(fields, dict):
        raise UsageError(f"{file} is JSON but no object", code="bad_model_config")
    return ConfigFields(fields, str(file))
