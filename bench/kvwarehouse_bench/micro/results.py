"""What a measure found, as a file that a report is made of: measures run one at a time, and each
again when it has to be. Stateless."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from kvwarehouse.errors import UsageError
from kvwarehouse_bench.micro.figures import Curve, Figure

_T = TypeVar("_T", Figure, Curve)


@dataclass(frozen=True)
class Result:
    measure: str
    conditions: dict[str, str]
    found: Sequence[Figure | Curve]

    def as_json(self) -> dict[str, Any]:
        figures = [each for each in self.found if isinstance(each, Figure)]
        curves = [each for each in self.found if isinstance(each, Curve)]
        return {
            "measure": self.measure,
            "conditions": self.conditions,
            "figures": [
                {**asdict(each), "ratio": each.ratio, "verdict": each.verdict} for each in figures
            ],
            "curves": [{**asdict(each), "growth": each.growth} for each in curves],
        }

    @classmethod
    def of_json(cls, made: dict[str, Any]) -> Result:
        found: list[Figure | Curve] = [
            *(_made(Figure, each) for each in made["figures"]),
            *(_made(Curve, each) for each in made["curves"]),
        ]
        return cls(made["measure"], made["conditions"], found)


def write_result(result: Result, folder: Path) -> None:
    """Replaces what the measure found before."""
    text = json.dumps(result.as_json(), indent=1) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{result.measure}.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"the results folder {folder} cannot be written: {error.strerror or error}",
            code="bad_path",
        ) from error


def read_results(folder: Path, names: Sequence[str]) -> list[Result]:
    """Of those measures that were run, in the order of the names."""
    files = [folder / f"{name}.json" for name in names]
    return [_read(file) for file in files if file.exists()]


def _read(file: Path) -> Result:
    try:
        return Result.of_json(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file} is no result of this version ({error}); run its measure again, or remove it",
            code="bad_result",
        ) from error


def _made(kind: type[_T], values: dict[str, Any]) -> _T:
    """What is derived stands in the file too, for its readers."""
    known = {field.name for field in fields(kind)}
    kept = {name: _tuples(value) for name, value in values.items() if name in known}
    return kind(**kept)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
