"""Which sources clang-tidy is given again, over a tree of three files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import run_clang_tidy


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        ".clang-tidy": "Checks: all",
        "requirements/lint.txt": "clang-tidy==1",
        "native/base/keys.h": "int key();",
        "native/slots/slots.h": '#include "base/keys.h"\n',
        "native/slots/slots.cc": '#include "slots.h"\n#include <vector>\n',
        "native/index/index.cc": "int index();\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    sources = [tmp_path / name for name in files if name.endswith(".cc")]
    commands = [
        {"file": str(path), "command": f"{sys.executable} -O3 -c {path}"}
        for path in (*sources, Path("/elsewhere/module.cc"))
    ]
    (tmp_path / "compile_commands.json").write_text(json.dumps(commands), "utf-8")
    monkeypatch.setattr(run_clang_tidy, "ROOT", tmp_path)
    monkeypatch.setattr(run_clang_tidy, "NATIVE", tmp_path / "native")
    monkeypatch.setattr(run_clang_tidy, "_compiler_version", lambda compiler: b"12")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def looked_at(tree: Path, monkeypatch: pytest.MonkeyPatch, bad: str = "") -> tuple[int, list[str]]:
    """The exit status, and what clang-tidy was given. `bad`: what has findings."""
    given: list[str] = []

    def findings(build: Path, source: run_clang_tidy.Source) -> str:
        given.append(source.path.name)
        return "bad" if source.path.name == bad else ""

    run_clang_tidy._read.cache_clear()
    monkeypatch.setattr(run_clang_tidy, "_findings", findings)
    monkeypatch.setattr(sys, "argv", ["run_clang_tidy.py", str(tree)])
    return run_clang_tidy.main(), sorted(given)


def test_what_was_clean_is_looked_at_again_only_after_a_change(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert looked_at(tree, monkeypatch) == (0, ["index.cc", "slots.cc"])
    assert looked_at(tree, monkeypatch) == (0, [])
    (tree / "native/index/index.cc").write_text("int other();\n", "utf-8")
    assert looked_at(tree, monkeypatch) == (0, ["index.cc"])


@pytest.mark.parametrize("changed", ["native/base/keys.h", "native/slots/slots.h"])
def test_change_of_a_header_is_one_of_all_that_include_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    looked_at(tree, monkeypatch)
    with (tree / changed).open("a") as header:
        header.write("int more();\n")
    assert looked_at(tree, monkeypatch) == (0, ["slots.cc"])


@pytest.mark.parametrize("changed", [".clang-tidy", "requirements/lint.txt"])
def test_change_of_the_rules_or_the_tools_is_one_of_all(
    tree: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    looked_at(tree, monkeypatch)
    (tree / changed).write_text("other", "utf-8")
    assert looked_at(tree, monkeypatch) == (0, ["index.cc", "slots.cc"])


def test_source_with_findings_fails_until_it_has_none(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert looked_at(tree, monkeypatch, bad="slots.cc")[0] == 1
    assert looked_at(tree, monkeypatch, bad="slots.cc") == (1, ["slots.cc"])
    assert looked_at(tree, monkeypatch) == (0, ["slots.cc"])
