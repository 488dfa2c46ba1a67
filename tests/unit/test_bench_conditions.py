"""What a bench says of the tree that it ran."""

from __future__ import annotations

import subprocess
from importlib import import_module
from pathlib import Path

import pytest

# The package has a function of that name.
conditions = import_module("kvwarehouse_bench.micro.conditions")


def git(folder: Path, *words: str) -> str:
    named = ("-c", "user.name=t", "-c", "user.email=t@t")
    command = ["git", "-C", str(folder), *named, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_is_named_with_whether_the_tree_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "_ROOT", tmp_path)
    assert conditions.commit() == "no checkout"
    git(tmp_path, "init", "-q")
    assert conditions.commit() == "commit unknown"
    (tmp_path / "source.py").write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    head = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert conditions.commit() == f"commit {head}"
    (tmp_path / "source.py").write_text("2\n")
    assert conditions.commit() == f"commit {head}-dirty"
