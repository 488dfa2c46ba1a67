"""The units of deploy/systemd under a real systemd."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from testkit.known_prompt import KnownPrompt
from testkit.user_manager import NoManagerError, UserManager

UNITS = Path(__file__).parents[2] / "deploy/systemd"
UNIT, TEMPLATE = UNITS / "kvwarehouse.service", UNITS / "kvwarehouse@.service"
PROMPT = KnownPrompt("m", pages=8, page_bytes=20_000)


class Service:
    """The daemon of UNIT, its arena and log in `folder`."""

    def __init__(self, manager: UserManager, folder: Path) -> None:
        self._manager = manager
        self._log = folder / "log"
        self._settings = folder / "kvwarehouse.toml"
        self._socket = manager.runtime / "kvwarehouse/kvw.sock"
        self.write_settings(arena_dir=str(folder / "arena"), socket=str(self._socket))
        self._folder = folder
        self.install()

    def install(self, *changes: str) -> None:
        """Of the unit, where it starts next."""
        serve = f"{sys.executable} -P -m kvwarehouse serve --config {self._settings}"
        usual = (
            *("User=", "ExecStart=", f"ExecStart={serve}"),
            *(f"StandardError=append:{self._log}", f"ReadWritePaths={self._folder}"),
        )
        self._manager.install(UNIT, {"Unit": ["RequiresMountsFor="], "Service": (*usual, *changes)})

    def write_settings(self, **settings: str) -> None:
        lines = {"dram": "16MiB", "http": "off", "log_format": "json", **settings}
        self._settings.write_text("".join(f'{name} = "{value}"\n' for name, value in lines.items()))

    def control(self, *command: str) -> None:
        self._manager.control(*command, UNIT.name)

    def shows(self, name: str) -> str:
        return self._manager.shows(UNIT.name)[name]

    def is_started_again(self) -> None:
        eventually(lambda: self.shows("NRestarts") != "0", "systemd starts it again")
        eventually(lambda: self.shows("ActiveState") == "active", "it serves again")

    def connect(self) -> kvw.Client:
        return kvw.connect(f"unix://{self._socket}")

    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture
def service() -> Iterator[Service]:
    folder = Path(tempfile.mkdtemp(prefix="kvw-test-", dir="/dev/shm"))
    try:
        with UserManager(folder) as manager:
            yield Service(manager, folder)
    except NoManagerError as error:
        pytest.skip(str(error))
    finally:
        shutil.rmtree(folder)


def test_unit_serves_ends_in_order_and_serves_what_it_had(service: Service) -> None:
    service.control("start")
    assert service.shows("StatusText") == "serving"  # and no sooner: Type=notify
    with service.connect() as client:
        PROMPT.store_whole(client)
    service.control("stop")
    assert service.shows("Result") == "success"
    assert service.shows("ExecMainStatus") == "0"
    assert '"event": "stopped"' in service.log()
    service.control("start")
    with service.connect() as client:
        assert PROMPT.load(client) == PROMPT.pages


def test_daemon_that_hangs_is_started_again_and_has_its_pages(service: Service) -> None:
    service.install("WatchdogSec=5")
    service.control("start")
    with service.connect() as client:
        PROMPT.store_whole(client)
    before = service.shows("MainPID")
    service.control("kill", "--signal=STOP")
    service.install()  # the next one has the unit's own: no busy machine is to look like a hang
    service.is_started_again()
    assert service.shows("MainPID") != before
    with service.connect() as client:
        assert PROMPT.load(client) == PROMPT.pages


def test_daemon_that_is_killed_is_started_again(service: Service) -> None:
    service.control("start")
    service.control("kill", "--signal=KILL")
    service.is_started_again()


def test_daemon_that_is_refused_is_started_until_it_serves(service: Service) -> None:
    """Incident: an earlier daemon that flushed held the port, and after five starts within eight
    seconds systemd tried no more."""
    service.install("ExecStart=", "ExecStart=/bin/false", "RestartSec=50ms")
    with pytest.raises(AssertionError, match="control process exited"):
        service.control("start")
    eventually(lambda: int(service.shows("NRestarts")) > 5, "systemd goes on")
    service.install()
    eventually(lambda: service.shows("ActiveState") == "active", "it serves")


def test_wrong_settings_are_not_tried_again(service: Service) -> None:
    service.write_settings(dram="much")
    with pytest.raises(AssertionError, match="control process exited"):
        service.control("start")
    assert service.shows("ActiveState") == "failed"
    assert (service.shows("NRestarts"), service.shows("ExecMainStatus")) == ("0", "2")


def test_template_is_the_unit_with_names() -> None:
    unit, template = (path.read_text().partition("[Unit]")[2] for path in (UNIT, TEMPLATE))
    named = template.replace("%i.toml", "NAME").replace("/%i", "").replace(" %i", "")
    assert named.replace("/NAME", ".toml") == unit


@pytest.mark.parametrize("unit", [UNIT, TEMPLATE], ids=["unit", "template"])
def test_unit_has_nothing_that_systemd_does_not_know(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    name = unit.name.replace("@.", "@a.")
    text = unit.read_text().replace("ExecStart=kvwarehouse", "ExecStart=/bin/true")
    (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(tmp_path / name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
