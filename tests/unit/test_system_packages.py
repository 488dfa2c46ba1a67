"""scripts/system_packages.sh: it installs nothing that it did not say, and asks where somebody can
answer."""

from __future__ import annotations

import pty
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "system_packages.sh"
TOOLS = ("bash", "cat", "dirname", "env", "id", "mkdir")
COMMAND = "apt-get install -y g++ libxxhash-dev liburing-dev"


class Machine:
    """One without a compiler, on which apt only notes what it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.asked = folder / "bin", folder / "asked"
        self.shown = ""  # at the terminal
        self.script = folder / "scripts" / SCRIPT.name
        for each in (self.bin, self.script.parent):
            each.mkdir()
        shutil.copy(SCRIPT, self.script)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None
            (self.bin / tool).symlink_to(found)
        self.add("c++", "exit 1")
        self.add("apt-get", f'echo "$@" >> {self.asked}')
        self.add("sudo", '[ "$1" = -n ] && shift; exec "$@"')

    def add(self, name: str, does: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{does}\n")
        path.chmod(0o755)

    def run(self, answer: str | None = None, **environment: str) -> tuple[int, str]:
        """Its exit status and all that it said. `answer`: what somebody at a terminal types."""
        command = ["bash", str(self.script)]
        variables = {"PATH": str(self.bin), **environment}
        if answer is None:
            ran = subprocess.run(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
            )  # fmt: skip
            return ran.returncode, ran.stdout
        here, there = pty.openpty()
        with open(here, "r+b", buffering=0) as terminal:
            with open(there, "r+b", buffering=0) as stdin:
                terminal.write(answer.encode())
                ran = subprocess.run(
                    command, env=variables, stdin=stdin, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
                )  # fmt: skip
            # What was written may come later than the end of who wrote it.
            shown = bytearray()
            with suppress(OSError):  # EIO: that was all, and nobody has it open
                while piece := terminal.read(1 << 12):
                    shown += piece
            self.shown = shown.decode()
            return ran.returncode, ran.stdout

    @property
    def installs(self) -> list[str]:
        lines = self.asked.read_text().splitlines() if self.asked.exists() else []
        return [line for line in lines if line.startswith("install")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_packages_are_installed_without_a_question_where_nobody_could_answer(
    machine: Machine,
) -> None:
    _, said = machine.run()
    assert COMMAND in said
    assert machine.installs
    assert machine.installs[0].endswith("g++ libxxhash-dev liburing-dev")


def test_packages_are_installed_without_a_question_in_continuous_integration(
    machine: Machine,
) -> None:
    machine.run(answer="n\n", CI="true")
    assert machine.installs


@pytest.mark.parametrize("answer", ["\n", "y\n", "Yes\n"])
def test_packages_are_installed_where_somebody_agrees(machine: Machine, answer: str) -> None:
    _, said = machine.run(answer=answer)
    assert COMMAND in said
    assert "g++ libxxhash-dev liburing-dev? [Y/n]" in machine.shown  # said may go to a file
    assert machine.installs


@pytest.mark.parametrize("answer", ["n\n", "what?\n", "\x04"])
def test_nothing_is_installed_where_nobody_agrees(machine: Machine, answer: str) -> None:
    status, said = machine.run(answer=answer)
    assert status == 1
    assert COMMAND in said
    assert not machine.installs


def test_nothing_is_installed_with_the_variable_and_the_command_is_said(machine: Machine) -> None:
    status, said = machine.run(KVW_NO_APT="1")
    assert status == 1
    assert COMMAND in said
    assert not machine.installs


def test_programs_of_single_tests_are_left_out_with_the_variable(machine: Machine) -> None:
    machine.add("c++", "cat >/dev/null")
    status, said = machine.run(KVW_NO_APT="1")
    assert status == 0
    assert "apt-get install -y ccache fio openssl strace" in said
    assert not machine.installs
    assert "apt-get" not in machine.run(KVW_NO_APT="1")[1]  # said once for a clone


def test_prometheus_is_unpacked_for_all_clones_and_not_installed(machine: Machine) -> None:
    machine.add("c++", "cat >/dev/null")
    for tool in ("mktemp", "mv", "rm"):
        machine.add(tool, f'exec {shutil.which(tool)} "$@"')
    unpacks = "mkdir -p usr/bin && touch usr/bin/prometheus usr/bin/promtool"
    machine.add("dpkg-deb", f"PATH=/usr/bin:/bin; {unpacks} && chmod +x usr/bin/*")
    cache = machine.bin.parent / "cache"
    status, said = machine.run(XDG_CACHE_HOME=str(cache))
    assert status == 0
    assert "unpacking the package prometheus" in said
    assert "going on without prometheus" not in said
    kept = cache / "kvwarehouse" / "prometheus"
    assert sorted(path.name for path in kept.iterdir()) == ["prometheus", "promtool"]
    assert not any("prometheus" in line for line in machine.installs)
    assert "prometheus" not in machine.run(XDG_CACHE_HOME=str(cache))[1]


def test_setup_goes_on_without_prometheus_and_says_so_once(machine: Machine) -> None:
    machine.add("c++", "cat >/dev/null")
    cache = machine.bin.parent / "cache"
    status, said = machine.run(KVW_NO_APT="1", XDG_CACHE_HOME=str(cache))
    assert status == 0
    assert "going on without prometheus" in said
    assert "prometheus" not in machine.run(KVW_NO_APT="1", XDG_CACHE_HOME=str(cache))[1]
