"""Pages of the site that are made of the code: what a document would have to repeat."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path

from public_names import API, commands, parser_of

from doc_site.error_codes import Raised, raised
from kvwarehouse import config, errors
from kvwarehouse.cli.exit_codes import MEANINGS
from kvwarehouse.daemon.metrics import METRICS, Metric
from kvwarehouse.wire import status_pb2

ROOT = Path(__file__).resolve().parents[2]

_MARKUP = re.compile(r"([\\*_<>\[\]#$~])")
_PROTO_ITEM = re.compile(
    r"^((?://[^\n]*\n)*)((?:service|message|enum|extend) ([\w.]+) \{(?:\}|.*?^\}))", re.M | re.S
)
_RPC = re.compile(r"^((?:  //[^\n]*\n)*)  (rpc (\w+)\(.*?\);)", re.M | re.S)


def pages() -> dict[str, str]:
    """Markdown by the name of its file in docs/reference, without a suffix."""
    makers = (_commands, _settings, _metrics, _errors, _grpc, _python)
    return {make.__name__[1:]: "\n\n".join(make()) + "\n" for make in makers}


def _plain(text: str) -> str:
    """`text` as a line that means itself, but for code between backticks."""
    parts = " ".join(text.split()).split("`")
    return "`".join(part if at % 2 else _MARKUP.sub(r"\\\1", part) for at, part in enumerate(parts))


def _table(*rows: Sequence[str]) -> str:
    """The first row is the head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _commands() -> Iterable[str]:
    yield "# Commands"
    yield "What each command of `kvwarehouse` takes, as its `--help` says it."
    for name in commands():
        parser = parser_of(name)
        yield f"## kvwarehouse {name}"
        yield _plain(parser.description or "")
        yield f"```text\n{parser.format_usage()}```"
        for group in parser._action_groups:
            rows = [_argument(parser, each) for each in group._group_actions if each.help]
            rows = [row for row in rows if row[0] not in ("`-h, --help`", "")]
            if rows:
                yield _table((_plain(group.title or ""), "meaning"), *rows)
        yield f"```text\n{(parser.epilog or '').strip(chr(10))}\n```"
    yield "## Exit status"
    yield _table(("", "means"), *((f"{int(c)}", _plain(what)) for c, what in MEANINGS.items()))


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str]:
    if action.help == argparse.SUPPRESS:
        return "", ""
    form = parser._get_formatter()
    text = form._expand_help(action)
    if action.default not in (None, False, argparse.SUPPRESS, "", []) and "efault" not in text:
        text += f" Default: `{action.default}`."
    if parser.prog == "kvwarehouse serve" and action.dest in config._FIELDS:
        text += f" Variable: `{_variable(action.dest)}`."
    return f"`{form._format_action_invocation(action)}`", _plain(text)


def _variable(key: str) -> str:
    return config.ENVIRONMENT_PREFIX + key.upper()


def _settings() -> Iterable[str]:
    yield "# Settings"
    yield (
        "All that `kvwarehouse serve` can be told. A flag comes before a variable, a variable "
        "before the TOML file that `--config` names, and that before the default. "
        "`kvwarehouse serve --print-config` says what is in effect, and where it came from. "
        "Connectors have settings of their own: [vLLM](../vllm.md#settings), "
        "[SGLang](../sglang.md#settings), [TensorRT-LLM](../trtllm.md#settings), "
        "[LMCache](../lmcache.md#settings)."
    )
    for key, item in config._FIELDS.items():
        about, flag = item.metadata, key.replace("_", "-")
        default = about["parse"].show(item.default)
        yield f"## {key}"
        yield _plain(about["meaning"])
        yield _table(
            ("flag", "variable", "key in the file"),
            (f"`--{flag} {about['parse'].shown}`", f"`{_variable(key)}`", f"`{key}`"),
        )
        yield f"Default: {f'`{default}`: ' if default else ''}{_plain(about['why'])}."
    yield "## Other variables"
    others = ((f"`{name}`", _plain(what)) for name, what in config.OTHER_VARIABLES.items())
    yield _table(("variable", "what it is"), *others)


def _metrics() -> Iterable[str]:
    yield "# Metrics"
    yield (
        "What `/metrics` shows, at the address of `--http`. Counters rise from the daemon's start. "
        "[What to watch](../operations.md#what-to-watch) says which matter. Connectors count "
        "in their engine's metrics: [vLLM](../vllm.md#see-that-it-works)."
    )
    rows = ((f"`{m.name}`", m.kind, _labels(m), _plain(m.help)) for m in METRICS.values())
    yield _table(("metric", "type", "labels", "meaning"), *rows)


def _labels(metric: Metric) -> str:
    """Names of labels with their values, as an empty status shows them."""
    found: dict[str, list[str]] = {}
    for read in metric.reads:
        for labels, _ in read(status_pb2.Status()):
            for name, value in labels.items():
                found.setdefault(name, []).append(f"`{value}`" if value else "any")
    return "; ".join(f"`{name}`: {', '.join(values)}" for name, values in found.items())


def _errors() -> Iterable[str]:
    yield "---\ntocdepth: 2\n---\n\n# Error codes"
    yield (
        "What is raised is a `kvwarehouse.WarehouseError` with a `code`, which is stable, and a "
        "text that says what happened and what to do; gRPC and commands show the same code. What "
        "a text is filled with stands in braces."
    )
    for error, found in groupby(raised(), lambda each: each.error):
        cls = getattr(errors, error, None)
        yield f"## {error or 'Others'}"
        yield _plain((cls and cls.__doc__) or "What a function raises with a class of its choice.")
        if cls:
            yield f"Retryable, where the error does not say otherwise: {cls.default_retryable}."
        for code, each in groupby(found, lambda each: each.code):
            yield f"### {code}"
            yield _texts(list(each), is_default=cls is not None and code == cls.default_code)


def _texts(found: Sequence[Raised], *, is_default: bool) -> str:
    texts = [f"- {_plain(each.text)}" for each in found if each.text]
    if is_default:
        texts.append("- an error that has no narrower code")
    return "\n".join(texts) or "The text says what happened."


def _grpc() -> Iterable[str]:
    yield "# gRPC"
    yield "The public service and its messages, as `proto/kvwarehouse/v1` has them."
    for path in sorted((ROOT / "proto").rglob("*.proto"), key=lambda path: path.stem, reverse=True):
        source = path.read_text("utf-8")
        yield f"## {path.name}"
        yield _comment(source.partition("syntax =")[0])
        for said, text, name in _PROTO_ITEM.findall(source):
            calls = _RPC.findall(text)
            yield f"### {name}\n\n{_comment(said)}"
            yield "" if calls else f"```protobuf\n{text}\n```"
            for about, rpc, call in calls:
                yield f"#### {name}.{call}\n\n{_comment(about)}\n\n```protobuf\n{rpc}\n```"


def _comment(lines: str) -> str:
    paragraphs = re.sub(r"^ *// ?", "", lines, flags=re.M).split("\n\n")
    return "\n\n".join(map(_plain, paragraphs))


def _python() -> Iterable[str]:
    yield "---\ntocdepth: 3\n---\n\n# Python"
    yield "What can be imported. [The Python client](../python.md) shows how it is used."
    for module in (*API, "kvwarehouse.host"):
        names = import_module(module).__all__
        constants = "".join(f".. autodata:: {module}.{name}\n" for name in names if name.isupper())
        yield (
            f"## {module}\n\n```{{eval-rst}}\n.. automodule:: {module}\n"
            f"   :members: {', '.join(names)}\n   :imported-members:\n   :undoc-members:\n\n"
            f"{constants}```"
        )
