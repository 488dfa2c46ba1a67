"""Watches the paths that others find this daemon by, sockets and files. Somebody may remove them
under us: a cleaner of temporary files, logind's RemoveIPC= at a user's last logout.

Looked at by one thread, about once a second: a handful of lstat calls. Clients that are connected
need none of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvwarehouse.config import Config
from kvwarehouse.daemon import directories
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.servers import Servers, file_at, is_gone
from kvwarehouse.errors import WarehouseError

_OTHERS_CONNECT: Final = 0o022  # to a socket, who may write to it

# The index has the number of its start in its name.
_ARENA_FILES: Final = ("arena", "slots", "index.*", "control")


class PathWatch:
    """`unreachable`: why new clients do not get in, "" where they do."""

    def __init__(
        self,
        config: Config,
        log: Log,
        core: Any,
        servers: Servers,
        unheard: Callable[[], str] = lambda: "",
    ) -> None:
        """Once everything is there. What is not is not looked for. `unheard`: why new subscribers
        of KV events do not get in, whose sockets the threads of the stream put back."""
        self._config, self._log = config, log
        arena = config.arena_dir
        self._sockets: dict[str, Callable[[], None]] = {
            config.socket: core.listen_again,
            config.grpc_socket: servers.bind_again,
        }
        sessions = os.path.join(arena, "sessions")
        self._sessions = sessions if os.path.isdir(sessions) else ""
        kept = {
            str(path): "the pages in DRAM"
            for name in _ARENA_FILES
            for path in Path(arena).glob(name)
        }
        if config.nvme_dir:
            kept[os.path.join(config.nvme_dir, "segments")] = "the pages on NVMe"
        self._kept = {path: (what, file_at(path)) for path, what in kept.items() if file_at(path)}
        self._seen = {path: file_at(path) for path in self._sockets}
        self._owned: list[directories.Ownership] = []
        self._unheard = unheard
        self.unreachable = ""
        self._lost = ""

    @property
    def reason(self) -> str:
        """What is gone and was not put back, and what follows; "" for nothing."""
        return "; ".join(filter(None, (self.unreachable, self._unheard(), self._lost)))

    def close(self) -> None:
        for each in self._owned:
            each.close()
        self._owned.clear()

    def look(self) -> None:
        """Puts back what can be, and says each thing once. Does not raise."""
        here = not self._sessions or os.path.isdir(self._sessions)
        failed = self._put_back(self._sessions, here, self._make_sessions)
        for path, bind in self._sockets.items():
            here = not is_gone(path, self._seen[path])
            problem = self._put_back(path, here, partial(self._bind, bind))
            failed = failed or problem
            if not here and not problem:
                # It may be gone again: what was there before stays missed then.
                self._seen[path] = file_at(path) or self._seen[path]
            if here:
                self._close_to_others(path)
        known, self.unreachable = self.unreachable, failed
        if failed and failed != known:
            self._log.event(Event.PATH_NOT_RESTORED, text=failed)
        self._look_at_kept()

    def _put_back(self, path: str, here: bool, make: Callable[[], None]) -> str:
        """Why it could not be."""
        if here:
            return ""
        try:
            make()
        except (OSError, WarehouseError) as error:
            return f"{path} was removed or replaced, and no new client gets in: {error}"
        self._log.event(Event.PATH_RESTORED, path=path, text="somebody removed it")
        return ""

    def _close_to_others(self, path: str) -> None:
        """gRPC does not know who its peer is: the mode of its socket is all that keeps others out.
        The folder is nobody else's, so what is there is what was looked at."""
        try:
            mode = os.lstat(path).st_mode & 0o777
            if not mode & _OTHERS_CONNECT:
                return
            os.chmod(path, 0o600)
        except OSError:
            return  # the next look finds what it is
        text = f"somebody gave it mode {mode:04o}, with which others can connect; it is 0600 again"
        self._log.event(Event.PATH_RESTORED, path=path, text=text)

    def _make_sessions(self) -> None:
        arena = self._config.arena_dir
        directories.prepare(arena, "--arena-dir")
        self._own(directories.lock_path(arena))
        os.makedirs(self._sessions, mode=0o700, exist_ok=True)

    def _bind(self, bind: Callable[[], None]) -> None:
        directories.prepare_for_socket(self._config.socket)
        self._own(self._config.socket + ".lock")
        bind()

    def _own(self, lock: str) -> None:
        """As at the start, so that no other daemon takes the place for a free one."""
        if not os.path.exists(lock):
            self._owned.append(directories.Ownership(lock))

    def _look_at_kept(self) -> None:
        gone = [path for path, (_, seen) in self._kept.items() if is_gone(path, seen)]
        if not gone:
            return  # what was said stays said: what is removed does not come back
        lost = " and ".join(dict.fromkeys(self._kept.pop(path)[0] for path in gone))
        text = (
            f"somebody removed or replaced {', '.join(gone)}: {lost}, and what is added to them, "
            "go on being served and end with this daemon; restart it when that suits"
        )
        # Before it is said: who reads the log may ask at once.
        self._lost = "; ".join(filter(None, (self._lost, text)))
        self._log.event(Event.PATH_REMOVED, text=text)
