"""Lists the names that users of the project write or read, by kind, as TOML: what may not change by
moving or renaming what is beneath them. Kept in tests/fixtures/public_names.toml, which a test
compares. Where a change is meant:

    .venv/bin/python scripts/public_names.py > tests/fixtures/public_names.toml
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from kvwarehouse import config, errors
from kvwarehouse.cli.commands import COMMANDS, find_plugins
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.main import main as run_command
from kvwarehouse.daemon.logs import Event
from kvwarehouse.daemon.metrics import METRICS
from kvwarehouse_bench.micro import MEASURES

ROOT = Path(__file__).resolve().parents[1]
CONNECTORS = "kvwarehouse_connectors"
API = ("kvwarehouse", "kvwarehouse.aio", "kvwarehouse.gpu", "kvwarehouse_connectors.transformers")
NAMED_TO_ENGINES = (
    "lmcache",
    "sglang",
    "trtllm",
    "vllm",
    "vllm.connector",
    "vllm.plugin",
    "vllm_tier",
)
WITH_SETTINGS = ("lmcache", "sglang", "trtllm", "vllm", "vllm_tier")
NATIVE_CODE = re.compile(r'Error\(\s*(?:kvw::)?ErrorKind::\w+,\s*"(\w+)"')


def names() -> dict[str, dict[str, list[str]]]:
    """Kind to lists; a list is what belongs to one command, module or engine."""
    return {
        "command_line": {
            **{name: _arguments(name) for name in (*commands(), "")},
            "bench measures": sorted(MEASURES),
            "exit codes": [f"{status.name} {int(status)}" for status in Exit],
        },
        "settings": {
            "serve": sorted(config._FIELDS),
            "variables": sorted(config.OTHER_VARIABLES),
            **{engine: _settings(engine) for engine in WITH_SETTINGS},
        },
        "metrics": {"names": sorted(f"{each.name} {each.kind}" for each in METRICS.values())},
        "log": {"events": sorted(Event)},
        "errors": {
            "classes": sorted(f"{cls.__name__} {kind}" for kind, cls in errors.BY_KIND.items()),
            "codes": sorted({*_python_codes(), *_native_codes()}),
        },
        "python": {module: sorted(import_module(module).__all__) for module in API},
        "connectors": {name: _module_names(f"{CONNECTORS}.{name}") for name in NAMED_TO_ENGINES},
        "entry_points": _entry_points(),
    }


def commands() -> list[str]:
    return sorted({*(command.name for command in COMMANDS), *find_plugins()})


def _arguments(command: str) -> list[str]:
    """The options and operands of a command ("": of the program itself), asked of its parser."""
    return sorted(filter(None, (_argument(action) for action in parser_of(command)._actions)))


def parser_of(command: str) -> argparse.ArgumentParser:
    """What reads the arguments of a command, one of another package too ("": of the program)."""
    parsers: list[argparse.ArgumentParser] = []
    # Commands that need an extra say so when they are imported, and nothing of it is used here.
    with (
        contextlib.suppress(SystemExit),
        patch.object(argparse.ArgumentParser, "print_help", lambda self: parsers.append(self)),
        patch.object(importlib.util, "find_spec", lambda name, package=None: name),
    ):
        run_command([*filter(None, [command]), "--help"])
    (parser,) = parsers
    return parser


def _argument(action: argparse.Action) -> str:
    if action.option_strings:
        return " ".join(action.option_strings)
    return "" if action.help == argparse.SUPPRESS else str(action.metavar or action.dest)


def _settings(engine: str) -> list[str]:
    settings = import_module(f"{CONNECTORS}.{engine}.settings")
    prefix = getattr(settings, "PREFIX", "kvwarehouse.")
    return sorted(
        f"{prefix}{name.upper() if prefix.isupper() else name}" for name in settings._CHECKS
    )


def _module_names(module: str) -> list[str]:
    """What an engine finds in a module that it imports by name; read, because the import would need
    the engine."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return sorted(name for name in defined if not name.startswith("_"))


def _entry_points() -> dict[str, list[str]]:
    """Names alone: what is behind them is ours to move."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {
        "scripts": sorted(project["scripts"]),
        "extras": sorted(project["optional-dependencies"]),
        "sglang.srt.plugins": sorted(project["entry-points"]["sglang.srt.plugins"]),
        "vllm.general_plugins": sorted(project["entry-points"]["vllm.general_plugins"]),
    }


def _python_codes() -> Iterator[str]:
    for module in product_sources("kvwarehouse", "connectors", "bench", ending=".py"):
        for node in ast.walk(ast.parse(module.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code":
                yield from possible_texts(node.value)
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "default_code":
                yield from possible_texts(node.value)


def possible_texts(node: ast.AST | None) -> Iterator[str]:
    """The strings that an expression may be."""
    if isinstance(node, ast.IfExp):
        yield from possible_texts(node.body)
        yield from possible_texts(node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def _native_codes() -> Iterator[str]:
    for source in product_sources("native", ending=".cc"):
        yield from NATIVE_CODE.findall(source.read_text("utf-8"))


def product_sources(*folders: str, ending: str) -> Iterable[Path]:
    """Of the product: what only tests raise is no user's."""
    found = [path for folder in folders for path in (ROOT / folder).rglob(f"*{ending}")]
    tests = {ROOT / "native" / "tests", ROOT / "native" / "fuzz"}
    return sorted(path for path in found if not tests & set(path.parents))


def as_toml(found: dict[str, dict[str, list[str]]]) -> str:
    lines = []
    for kind, lists in found.items():
        lines.append(f"[{kind}]")
        for name, members in lists.items():
            inner = "".join(f"  {json.dumps(member)},\n" for member in members)
            lines.append(f"{json.dumps(name)} = [\n{inner}]\n")
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_toml(names()), end="")
