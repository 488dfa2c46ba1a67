"""The lint that refuses a class name that exists twice: what it finds, and its list that only
shrinks."""

from __future__ import annotations

from pathlib import Path

import pytest

import check_names


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages with the class Twice in two of them, which the list allows."""
    for package in check_names.PACKAGES:
        (tmp_path / package).mkdir(parents=True)
    (tmp_path / "kvwarehouse/one.py").write_text("class Twice: ...\nclass Once: ...\n")
    (tmp_path / "bench/kvwarehouse_bench/two.py").write_text(
        "def made():\n    class Twice: ...\n    return Twice\n"
    )
    generated = tmp_path / "kvwarehouse/wire/generated"
    generated.mkdir(parents=True)
    (generated / "rpc.py").write_text("class Once: ...\n")
    (tmp_path / check_names.ALLOWED).parent.mkdir()
    (tmp_path / check_names.ALLOWED).write_text("Twice 2\n")
    monkeypatch.setattr(check_names, "ROOT", tmp_path)
    monkeypatch.setattr(check_names.sys, "argv", ["check_names.py"])
    return tmp_path


def test_names_pass_as_long_as_they_are_repeated_as_often_as_the_list_says(tree: Path) -> None:
    assert check_names.main() == 0


@pytest.mark.parametrize(("name", "times"), [("Once", 2), ("Twice", 3)])
def test_name_is_refused_with_its_places_when_one_more_class_takes_it(
    tree: Path, capsys: pytest.CaptureFixture[str], name: str, times: int
) -> None:
    (tree / "connectors/kvwarehouse_connectors/three.py").write_text(f"\nclass {name}: ...\n")
    assert check_names.main() == 1
    said = capsys.readouterr().err
    assert said.startswith(f"class {name} is defined {times} times")
    assert "kvwarehouse/one.py:" in said
    assert "connectors/kvwarehouse_connectors/three.py:2" in said


def test_list_is_refused_when_a_name_in_it_is_no_longer_repeated_and_shrinks_by_write(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "kvwarehouse/one.py").write_text("class Once: ...\n")
    assert check_names.main() == 1
    assert "allows 2 classes named Twice" in capsys.readouterr().err
    monkeypatch.setattr(check_names.sys, "argv", ["check_names.py", "--write"])
    assert check_names.main() == 0
    assert (tree / check_names.ALLOWED).read_text() == ""


def test_write_does_not_lengthen_the_list(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "connectors/kvwarehouse_connectors/three.py").write_text(
        "class Once: ...\nclass Twice: ...\n"
    )
    monkeypatch.setattr(check_names.sys, "argv", ["check_names.py", "--write"])
    assert check_names.main() == 1
    assert (tree / check_names.ALLOWED).read_text() == "Twice 2\n"
