"""What the daemon sees of the paths that others find it by, over sockets that are plain files."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvwarehouse import config
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.path_watch import PathWatch


class Watched:
    """`at_event`: called with each event, before it is in the log."""

    def __init__(self, folder: Path) -> None:
        settings = {"socket": str(folder / "kvw.sock"), "arena_dir": str(folder / "arena")}
        self.config = config.load({**settings, "dram": "16MiB"}, {})
        self.socket, self.arena = Path(self.config.socket), folder / "arena" / "arena"
        self.arena.parent.mkdir(mode=0o700)
        for path in (self.socket, Path(self.config.grpc_socket), self.arena):
            path.touch(0o600)
        self.at_event: Callable[[Event], object] = lambda event: None
        grpc_socket = Path(self.config.grpc_socket)
        core: Any = SimpleNamespace(listen_again=partial(self.socket.touch, 0o600))
        servers: Any = SimpleNamespace(bind_again=partial(grpc_socket.touch, 0o600))
        self.watch = PathWatch(self.config, self._log(), core, servers)

    def _log(self) -> Log:
        log = Log("json", io.StringIO())
        said = log.event

        def event(event: Event, **fields: object) -> None:
            self.at_event(event)
            said(event, **fields)

        log.event = event  # type: ignore[method-assign]
        return log


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    tmp_path.chmod(0o700)
    return Watched(tmp_path)


def test_socket_that_is_removed_again_as_it_is_put_back_is_put_back_at_the_next_look(
    watched: Watched,
) -> None:
    """Incident: that there was none was taken for what had to be there, and it stayed away."""
    watched.socket.unlink()
    watched.at_event = lambda event: watched.socket.unlink()
    watched.watch.look()
    assert not watched.socket.exists()
    watched.at_event = lambda event: None
    watched.watch.look()
    assert watched.socket.exists()
    assert watched.watch.unreachable == ""


def test_status_has_what_is_lost_when_the_log_says_it(watched: Watched) -> None:
    """Incident: who asked as soon as the log had said it was told that all was well."""
    reasons: list[str] = []
    watched.at_event = lambda event: reasons.append(watched.watch.reason)
    watched.arena.unlink()
    watched.watch.look()
    assert [str(watched.arena) in reason for reason in reasons] == [True]


def test_status_has_what_is_out_of_reach_when_the_log_says_it(watched: Watched) -> None:
    reasons: list[str] = []
    watched.at_event = lambda event: reasons.append(watched.watch.unreachable)
    watched.socket.unlink()
    watched.socket.parent.chmod(0o777)
    watched.watch.look()
    assert [str(watched.socket) in reason for reason in reasons] == [True]


def test_disk_that_fails_to_say_what_is_there_is_not_taken_for_a_removal(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: after one error of the disk the status said to the end that somebody had removed
    the pages on it."""
    said: list[Event] = []
    watched.at_event = said.append

    def fail(path: str) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", fail)
        watched.watch.look()
    watched.watch.look()
    assert (said, watched.watch.reason) == ([], "")
    watched.arena.unlink()
    watched.watch.look()
    assert said == [Event.PATH_REMOVED]


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
@pytest.mark.parametrize("suffix", ["", ".grpc"])
def test_socket_that_others_may_connect_to_is_closed_to_them_and_told_once(
    watched: Watched, suffix: str, mode: int
) -> None:
    said: list[Event] = []
    watched.at_event = said.append
    socket = watched.socket.with_name(watched.socket.name + suffix)
    socket.chmod(mode)
    watched.watch.look()
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    watched.watch.look()
    assert (said, watched.watch.reason) == ([Event.PATH_RESTORED], "")


def test_file_that_replaced_a_socket_keeps_its_mode(watched: Watched) -> None:
    other = watched.socket.with_name("other")
    other.touch()
    other.chmod(0o666)
    other.rename(watched.socket)
    watched.watch.look()
    assert stat.S_IMODE(watched.socket.stat().st_mode) == 0o666
