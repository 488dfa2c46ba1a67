"""The locks in requirements/, and how an environment of the cache becomes one of a clone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import environments
import lock
import setup

ENVIRONMENTS = environments.environments()
NEVER = re.compile(r"^(torch|torchvision|torchaudio|cupy.*|nvidia-(?!cufile|cuda-nvrtc).*)==")


def pins(name: str) -> dict[str, list[str]]:
    """Package to versions: there are several where Pythons differ."""
    found: dict[str, list[str]] = {}
    for line in ENVIRONMENTS[name].lock.read_text("utf-8").splitlines():
        if "==" in line and not line.startswith("#"):
            requirement = Requirement(line)
            [version] = (each.version for each in requirement.specifier)
            found.setdefault(canonicalize_name(requirement.name), []).append(version)
    return found


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_lock_pins_all_that_its_environment_asks_for(name: str) -> None:
    environment, pinned = ENVIRONMENTS[name], pins(name)
    absent = {canonicalize_name(each) for each in environment.excluded()}
    for text in [*environment.requirements(), *environment.requirements_alone()]:
        wanted = Requirement(text)
        key = canonicalize_name(wanted.name)
        if key in absent or (wanted.marker and not wanted.marker.evaluate()):
            continue
        assert pinned.get(key), f"{wanted} is not in {environment.lock.name}: make lock"
        assert all(wanted.specifier.contains(each, prereleases=True) for each in pinned[key])


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_lock_brings_no_other_torch_and_no_cuda(name: str) -> None:
    lines = ENVIRONMENTS[name].lock.read_text("utf-8").splitlines()
    assert [line for line in lines if NEVER.match(line)] == []


def test_locks_were_made_from_the_ranges_of_now() -> None:
    assert lock.main(["--check"]) == 0


def test_lock_that_was_made_from_other_ranges_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def more(name: str) -> list[str]:
        return ["newcomer>=1"]

    monkeypatch.setattr(environments, "_extra", more)
    assert lock.main(["--check", "test", "dynamo"]) == 1
    assert "requirements/ of test are not what" in capsys.readouterr().err


def test_environment_of_a_clone_shares_files_and_names_only_itself(tmp_path: Path) -> None:
    base, folder = tmp_path / "cache" / "test-1", tmp_path / "clone" / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", base], check=True)
    package = next(base.glob("lib/python3*/site-packages")) / "shared.py"
    package.write_text("VALUE = 7\n")
    tool = base / "bin" / "tool"
    tool.write_text(f"#!{base}/bin/python\nimport shared\nprint(shared.__file__)\n")
    tool.chmod(0o755)
    (base / "complete").touch()
    setup.link(base, folder)
    linked = folder / package.relative_to(base)
    assert linked.stat().st_ino == package.stat().st_ino
    assert not (folder / "complete").exists()
    printed = subprocess.run([folder / "bin" / "tool"], check=True, capture_output=True, text=True)
    assert printed.stdout.strip() == str(linked)
    for path in [folder / "pyvenv.cfg", *(folder / "bin").iterdir()]:
        assert path.is_symlink() or str(base) not in path.read_text()
    assert f"{base}/bin/python" in tool.read_text()  # the one in the cache is as it was
