"""What is installed, and what it is built from: file lists of a wheel and a source distribution."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvwarehouse", "bench/kvwarehouse_bench", "connectors/kvwarehouse_connectors")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git knows: a look at all the environments in a clone would take long."""
    folder = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def built(call: str, tree: Path, folder: Path) -> Path:
    code = f"import sys; from scikit_build_core.build import *; {call}"
    command = [sys.executable, "-P", "-c", code, str(folder)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=100)
    (file,) = folder.iterdir()
    return file


def test_wheel_has_the_product_its_connectors_and_its_benches_and_no_tests(
    tree: Path, tmp_path: Path
) -> None:
    """But for the native core, which takes a compiler a minute."""
    file = built("build_wheel(sys.argv[1], {'wheel.cmake': 'false'})", tree, tmp_path)
    with zipfile.ZipFile(file) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {
        str(path.relative_to((tree / package).parent))
        for package in PACKAGES
        for path in (tree / package).rglob("*")
        if path.is_file()
    }
    assert names == sources
    parts = {part for name in names for part in name.split("/")}
    assert not [part for part in parts if part.startswith(("test", "conftest"))]


def test_source_distribution_has_what_a_wheel_is_built_from(tree: Path, tmp_path: Path) -> None:
    file = built("build_sdist(sys.argv[1])", tree, tmp_path)
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {
        str(path.relative_to(tree))
        for folder in ("native", "proto", *PACKAGES)
        for path in (tree / folder).rglob("*")
        if path.is_file()
    }
    assert {"pyproject.toml", "README.md", "LICENSE", *sources} <= names
