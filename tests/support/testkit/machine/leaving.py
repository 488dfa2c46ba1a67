"""Rules by which pages leave: evictions, clears, sweeps, by calls and by commands; and pins, by
which they do not.
"""

from __future__ import annotations

import json

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from testkit.machine.base import (
    CALM,
    MOST_PINS,
    SPACES,
    WAIT_S,
    Held,
    MachineBase,
    places,
    space_numbers,
)


class Leaving(MachineBase):
    @rule(
        space=st.none() | space_numbers,
        pages=st.integers(1, 200),
        tiers=st.sampled_from(["dram", "nvme", "all"]),
        by_command=st.booleans(),
    )
    def evict(self, space: int | None, pages: int, tiers: str, by_command: bool) -> None:
        self.steps += 1
        if by_command and space is not None:
            said = self.command(
                "evict", SPACES[space].model, "--pages", str(pages), "--tier", tiers
            )
            assert "evicted" in said
            return
        assert self.admin.evict(None if space is None else SPACES[space], pages, tiers) <= pages

    @precondition(lambda self: self.steps > CALM)
    @rule(space=st.none() | space_numbers, by_command=st.booleans())
    def clear(self, space: int | None, by_command: bool) -> None:
        self.steps += 1
        if by_command:
            what = "--all" if space is None else SPACES[space].model
            self.command("clear", what, "--yes")
        else:
            self.admin.clear(None if space is None else SPACES[space], all=space is None)
        self.cleared = True
        for number, book in enumerate(self.books):
            if space in (None, number):
                book.clear()
                for held in self.held:
                    if held.space == number:
                        held.nodes = ()

    @rule(sweep=st.booleans(), by_command=st.booleans())
    def tidy(self, sweep: bool, by_command: bool) -> None:
        self.steps += 1
        if by_command:
            assert json.loads(self.command("flush"))["pending"] == 0
        else:
            self.flush()
        if sweep:
            self.admin.sweep()

    # --- pins

    @precondition(lambda self: len(self.held) < MOST_PINS)
    @rule(space=space_numbers, place=places, client=st.integers(0, 1))
    def pin(self, space: int, place: int, client: int) -> None:
        self.steps += 1
        book = self.books[space]
        if not book.nodes:
            return
        path = book.path(place % book.nodes)[:40]
        pins = self.opened[client][space].pin(book.tokens(path), timeout_s=WAIT_S)
        assert pins.pages <= book.longest(path)
        self.held.append(Held(pins, space, path[: pins.pages]))

    @precondition(lambda self: self.held)
    @rule(place=places)
    def release(self, place: int) -> None:
        self.steps += 1
        self.held.pop(place % len(self.held)).pins.release()
