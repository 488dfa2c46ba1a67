"""Every error code, with the texts that it comes with, read from the sources that raise it.

A text says what happened and what to do; what it is filled with stands in braces.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from public_names import NATIVE_CODE, possible_texts, product_sources

from kvwarehouse import errors

_CLASSES = {cls.__name__: cls for cls in (errors.WarehouseError, *errors.BY_KIND.values())}
_NATIVE_KIND = re.compile(r"ErrorKind::(\w+)")
_NATIVE_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_WORD = re.compile(r"[a-z]{2,} [a-z]")


@dataclass(frozen=True, order=True)
class Raised:
    """`error`: the class, empty where a function of ours chooses it, and the text with it; `text`:
    empty where it is not written where it is raised."""

    error: str
    code: str
    text: str


def raised() -> list[Raised]:
    """By class and code, each once; those of no one class last."""
    return sorted({*_in_python(), *_in_native()}, key=lambda each: (not each.error, each))


def _in_python() -> Iterator[Raised]:
    for path in product_sources("kvwarehouse", "connectors", "bench", ending=".py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                yield from _call(node)
            if isinstance(node, ast.ClassDef) and node.name in _CLASSES:
                yield Raised(node.name, _CLASSES[node.name].default_code, "")


def _call(node: ast.Call) -> Iterator[Raised]:
    name = ast.unparse(node.func).rpartition(".")[2]
    if name not in _CLASSES:
        name = ""
    codes = [
        text for key in node.keywords if key.arg == "code" for text in possible_texts(key.value)
    ]
    for code in codes:
        for text in _messages(node.args[0]) if name and node.args else [""]:
            yield Raised(name, code, text if _WORD.search(text) else "")


def _messages(node: ast.expr) -> list[str]:
    """What an expression of text may say."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(_messages(part)[0] for part in node.values)]
    if isinstance(node, ast.BinOp):
        return [a + b for a in _messages(node.left) for b in _messages(node.right)]
    if isinstance(node, ast.IfExp):
        return _messages(node.body) + _messages(node.orelse)
    return ["{" + _named(node) + "}"]


def _named(node: ast.AST) -> str:
    """A word for what fills a text: the last name of the expression's first part."""
    if isinstance(node, ast.FormattedValue):
        return _named(node.value)
    if isinstance(node, ast.Name):
        return node.id.strip("_")
    if isinstance(node, ast.Attribute):
        return node.attr.strip("_")
    if isinstance(node, ast.Call):
        return _named(node.args[0] if node.args else node.func)
    names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name | ast.Attribute)]
    return _named(names[0]) if names else "..."


def _in_native() -> Iterator[Raised]:
    for path in product_sources("native", ending=".cc"):
        source = path.read_text("utf-8")
        for match in NATIVE_CODE.finditer(source):
            kind = _NATIVE_KIND.search(match[0])
            assert kind, match[0]
            end = source.find(";\n", match.end())
            text = _native_text(source[match.end() : end])
            yield Raised(errors.BY_KIND[kind[1]].__name__, match[1], text)


def _native_text(expression: str) -> str:
    """The strings of a C++ expression; what is between two of them is one thing that fills."""
    parts = _NATIVE_STRING.split(expression)
    fills = ["{...}" if "+" in part else "" for part in parts[2::2]]
    return "".join(a + b for a, b in zip(parts[1::2], fills, strict=True)).replace('\\"', '"')
