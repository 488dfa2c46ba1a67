"""A real systemd, as a user's service manager in namespaces of its own: processes, mounts and users
are gone with it, however the test ends, and the machine's own systemd, if there is one, hears
nothing.

    with UserManager(folder) as manager:
        manager.install(unit, {"Service": ["User=", "WatchdogSec=3"]})
        manager.control("start", unit.name)
        manager.shows(unit.name)["ActiveState"]

It has no control groups, and no kernel log or tunables that it could protect: a unit that asks for
the latter is given a drop-in without. Not thread-safe.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually

_SYSTEMD: Final = Path("/lib/systemd/systemd")
_TOOLS: Final = ("systemctl", "unshare", "nsenter", "mount")

# A booted system is known by that folder: sd_booted(3). The first process, which no user's manager
# may be, stays a shell.
_START: Final = (
    "mount -t tmpfs none /run && mkdir -p /run/systemd/system && "
    f"{_SYSTEMD} --user --unit=basic.target --show-status=no; exit"
)
_OUTSIDE: Final = (
    *("unshare", "--map-root-user", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"),
    *("bash", "-c", _START),
)
_NOT_HERE: Final = ("ProtectKernelLogs=no", "ProtectKernelTunables=no")


class NoManagerError(Exception):
    """There is no systemd, or no namespaces for it; the text says which."""


class UserManager:
    """folder: for its sockets and units, and for what units write below `runtime`; its path must
    be short, as one of a socket."""

    def __init__(self, folder: Path) -> None:
        self.runtime = folder / "run"
        self._units = folder / "config/systemd/user"
        self._log = folder / "manager.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "XDG_CONFIG_HOME": str(folder / "config"),
        }

    def __enter__(self) -> Self:
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing or not _SYSTEMD.exists():
            raise NoManagerError(f"there is no {(missing or ['systemd'])[0]} here")
        self.runtime.mkdir(mode=0o700)
        self._units.mkdir(parents=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                _OUTSIDE, env=self._environment, stdout=log, stderr=log
            )
        try:
            eventually(self._answers, "systemd answers")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise NoManagerError(f"systemd does not start: {self._log.read_text()[-500:]}")
        done = self._systemctl("is-system-running")
        return done.stdout.strip() in ("running", "degraded")

    def _end(self) -> None:
        assert self._process is not None
        inside = self._children()
        self._process.kill()  # and the kernel all that is inside
        self._process.wait(DEADLINE_S)
        # The first inside goes last: until then others write to the folder.
        eventually(lambda: not any(map(_runs, inside)), "all that was inside has ended")

    def install(self, unit: Path, changes: Mapping[str, Sequence[str]]) -> None:
        """The unit as it is, and a drop-in: lines by their sections."""
        sections = {**changes, "Service": [*changes.get("Service", ()), *_NOT_HERE]}
        drop_ins = self._units / f"{unit.name}.d"
        drop_ins.mkdir(exist_ok=True)
        text = "".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items())
        (drop_ins / "test.conf").write_text(text)
        shutil.copy(unit, self._units)
        self.control("daemon-reload")

    def control(self, *command: str) -> None:
        """Of systemctl. AssertionError with what it said."""
        done = self._systemctl(*command)
        assert done.returncode == 0, f"systemctl {' '.join(command)}: {done.stderr}"

    def shows(self, unit: str) -> dict[str, str]:
        """Its properties."""
        lines = self._systemctl("show", unit).stdout.splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def _inside(self) -> list[str]:
        """A command there: systemd and systemctl look at each other's process and user."""
        first = "".join(self._children())
        return ["nsenter", f"--target={first}", "--user", "--mount", "--pid"]

    def _children(self) -> list[str]:
        """The first process inside; none before it is there, and when it has ended."""
        assert self._process is not None
        pid = self._process.pid
        try:
            return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except FileNotFoundError:
            return []

    def _systemctl(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._inside(), "systemctl", "--user", *command],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )


def _runs(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"  # nobody may be there to bury it
