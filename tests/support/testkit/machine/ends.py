"""Rules by which the daemon ends, and the next one begins with what it left."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import kvwarehouse as kvw
from testkit import tally
from testkit.machine.base import CALM, SPACES, MachineBase, places

_KILLED: Final = "daemon killed between random operations, then checked against a dictionary"
_STOPPED: Final = "daemon stopped or drained between random operations, then checked"
_REBOOTED: Final = "arena lost between random operations, then checked against a dictionary"
ENDS: Final = {
    "kill_at_rest": _KILLED,
    "kill_in_motion": _KILLED,
    "stop_flushed": _STOPPED,
    "stop_at_once": _STOPPED,
    "stop_drained": _STOPPED,
    "reboot_orderly": _REBOOTED,
    "reboot_at_once": _REBOOTED,
}


class Ends(MachineBase):
    @precondition(lambda self: self.steps >= CALM)
    @rule(end=st.sampled_from(sorted(ENDS)), place=places)
    def end(self, end: str, place: int) -> None:
        getattr(self, end)(place)
        tally.count(ENDS[end])

    def kill_at_rest(self, place: int) -> None:
        self.audit()
        self.serving.kill()
        self.use_without_daemon(place)
        self.restart(("dram", "nvme"))

    def kill_in_motion(self, place: int) -> None:
        """Right behind a store, while it is written to NVMe; what left since the last audit was
        counted by a daemon that is gone."""
        self.flood(place % len(SPACES), 2, 16 + place % 80, False)
        self.serving.kill()
        self.restart(())

    def stop_flushed(self, place: int) -> None:
        self.flush()
        self.audit()
        assert self.serving.stop() == 0
        self.restart(("dram", *self._kept()))

    def stop_at_once(self, place: int) -> None:
        self.audit()
        assert self.serving.stop() == 0
        self.restart(("dram", *self._kept()))

    def _kept(self) -> tuple[str, ...]:
        """Whether NVMe is as the last audit saw it when the daemon has stopped: its last flush
        writes what is in DRAM alone, also what reclaim has taken from NVMe, and may recycle
        segments for it, uncounted by the next."""
        return () if self.snapshot.in_dram_alone() else ("nvme",)

    def reboot_orderly(self, place: int) -> None:
        """The arena is lost; what was flushed is not. Clients end with their host."""
        self.flush()
        self.audit()
        self.disconnect()
        assert self.serving.stop() == 0
        self.serving.lose_arena()
        self.restart(self._kept())

    def reboot_at_once(self, place: int) -> None:
        self.flush()
        self.audit()
        self.disconnect()
        self.serving.kill()
        self.serving.lose_arena()
        self.restart(("nvme",))

    def stop_drained(self, place: int) -> None:
        """A drained daemon takes nothing more, and serves what it has until it ends."""
        self.flush()
        self.audit()
        self.command("drain")
        for space, book in enumerate(self.books):
            path = book.path(book.grow(-1, 3))
            result = self.opened[place % 3][space].store(
                book.tokens(path), book.pages(path, 0), 0, timeout_s=1
            )
            assert sum(result.dropped.values()) == len(path), result
            known = book.path(place % book.nodes)
            self.lookup(space, known, place % 3)
            self.check_load(space, known, 0, place % 3, 0.0)
        assert self.serving.stop() == 0
        self.restart(("dram", *self._kept()))

    def use_without_daemon(self, place: int) -> None:
        """Shared memory still serves; what needs a daemon says at once that there is none."""
        for space, book in enumerate(self.books):
            if not book.nodes:
                continue
            path = book.path(place % book.nodes)
            self.lookup(space, path, 0)
            self.check_load(space, path, 0, 0, 0.0)
            with pytest.raises(kvw.TransportError):
                self.opened[1][space].store(book.tokens(path), book.pages(path, 0), 0)
            with pytest.raises(kvw.TransportError):
                self.opened[2][space].lookup(book.tokens(path))
