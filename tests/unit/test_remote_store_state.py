"""What a fleet's store is said to be in, of one that works."""

from __future__ import annotations

from dataclasses import replace

from kvwarehouse.remote.capacity import GRANT_S
from kvwarehouse.remote.fleet_store import FleetFacts
from kvwarehouse.remote.store_state import fleet_state

FACTS = FleetFacts(
    used_bytes=10,
    objects=1,
    nodes=1,
    is_seen=True,
    room_bytes=5,
    is_full=False,
    deleted_objects=0,
    listed_ago_s=1.0,
    put_if_absent=True,
    clock_jump_s=0.0,
)


def state(facts: FleetFacts, *, may_ask: bool = True) -> str:
    return fleet_state(facts, 100, may_ask=may_ask)[0]


def test_store_serves_once_it_is_listed_and_others_see_this_host() -> None:
    assert state(replace(FACTS, listed_ago_s=-1.0)) == "starting"
    assert state(FACTS, may_ask=False) == "starting"
    assert state(FACTS) == "serving"


def test_store_is_full_where_this_host_has_no_part_left() -> None:
    assert state(replace(FACTS, room_bytes=0)) == "full"
    assert state(replace(FACTS, is_full=True)) == "full"


def test_store_that_is_not_listed_any_more_is_not_called_full() -> None:
    late = replace(FACTS, room_bytes=0, listed_ago_s=GRANT_S + 60)
    said, why = fleet_state(late, 100, may_ask=True)
    assert said == "failing"
    assert f"{(GRANT_S + 60) / 60:.0f} minutes ago" in why


def test_store_whose_clock_is_doubted_is_said_to_fail() -> None:
    said, why = fleet_state(replace(FACTS, clock_jump_s=-7 * 86400.0), 100, may_ask=False)
    assert said == "failing"
    assert "jumped by -7.0 days" in why
