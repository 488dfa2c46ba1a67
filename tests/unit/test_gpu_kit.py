"""scripts/gpu_kit.sh in a repository of its own, with wheels that are pretended."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_kit.sh"

WHEELS = """\
#!/bin/sh
mkdir -p "$1" && head -c "${WHEEL_BYTES:-1000}" /dev/urandom >"$1/any.whl"
"""


def git(tree: Path, *arguments: str) -> str:
    who = ["-c", "user.name=any", "-c", "user.email=any@example.org"]
    command = ["git", "-C", str(tree), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "clone"
    (tree / "scripts").mkdir(parents=True)
    for name, text in {"gpu_kit.sh": SCRIPT.read_text("utf-8"), "gpu_wheels.sh": WHEELS}.items():
        (tree / "scripts" / name).write_text(text, encoding="utf-8")
        (tree / "scripts" / name).chmod(0o755)
    (tree / ".gitignore").write_text("/build/\n")
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "what is packed")
    return tree


def pack(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {"PATH": "/usr/local/bin:/usr/bin:/bin", **environment}
    command = [str(tree / "scripts" / "gpu_kit.sh")]
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)


def test_kit_has_the_commit_and_wheels_and_says_so(tree: Path) -> None:
    (tree / "not committed").touch()
    packed = pack(tree)
    assert packed.returncode == 0, packed.stderr
    assert "not packed:\n" in packed.stderr
    assert "not committed" in packed.stderr
    with tarfile.open(tree / "build" / "gpu-kit.tar.gz") as kit:
        names = {each.name for each in kit if each.isfile()}
        commit = kit.extractfile("kvwarehouse/build/gpu-kit.commit")
        assert commit is not None
        told = commit.read().decode()
    assert names == {
        "kvwarehouse/.gitignore",
        "kvwarehouse/scripts/gpu_kit.sh",
        "kvwarehouse/scripts/gpu_wheels.sh",
        "kvwarehouse/build/gpu-wheels/any.whl",
        "kvwarehouse/build/gpu-kit.commit",
    }
    assert told.startswith(git(tree, "rev-parse", "HEAD").strip())
    assert [each.name for each in (tree / "build").iterdir()] == ["gpu-kit.tar.gz"]


def test_kit_that_is_too_large_is_refused_and_none_is_left(tree: Path) -> None:
    assert pack(tree).returncode == 0
    packed = pack(tree, WHEEL_BYTES="40000001")
    assert packed.returncode == 1
    assert "more than 40000000: what became larger?" in packed.stderr
    assert "any.whl" in packed.stderr
    assert list((tree / "build").iterdir()) == []
