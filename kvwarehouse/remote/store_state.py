"""What state a worker's store is in, in one word and a reason that says what to do. Stateless."""

from __future__ import annotations

from typing import Final

from kvwarehouse.errors import TransportError
from kvwarehouse.remote.capacity import GRANT_S
from kvwarehouse.remote.fleet_store import FleetFacts
from kvwarehouse.remote.store_gate import PROBE_EVERY_S, StoreProblem

_OF_CODE: Final = {"remote_refused": "refused", "remote_full": "full"}
_ADVICE: Final = {
    "failing": "puts wait, and it is asked again by and by; look whether it runs and is reached "
    "from this host",
    "refused": f"it is asked again every {PROBE_EVERY_S:g} s; look at the credentials in the "
    "daemon's environment, at what they may do there, and whether the bucket is there",
    "full": f"one put is tried every {PROBE_EVERY_S:g} s; make room there, or lower "
    "--remote-capacity",
}


HANGS: Final = (
    "failing",
    "the store gives no answer; look at the mount, if it is a folder. Puts wait",
)


def failing_state(failure: TransportError | None) -> tuple[str, str]:
    """Of a store that is not asked for now, because so much has failed."""
    return (
        _told(failure.code, failure.message) if failure else _told("", "the store gives no answer")
    )


def gate_state(problem: StoreProblem) -> tuple[str, str]:
    """Of a store that takes no puts, or gives nothing."""
    return _told(problem.code, problem.text)


def fleet_state(facts: FleetFacts, capacity_bytes: int, *, may_ask: bool) -> tuple[str, str]:
    """Of a store that works. `may_ask`: the fleet has given this host its part of the capacity."""
    if facts.clock_jump_s:
        return "failing", (
            f"the store's clock has jumped by {facts.clock_jump_s / 86400:+.1f} days; nothing is "
            "put or deleted until it is set right, or has said so for an hour: then what is too "
            "old by it expires"
        )
    if facts.listed_ago_s < 0:
        return "starting", "what the fleet has in the store is being listed"
    if not may_ask:
        return "starting", "the other hosts have to see this one for two minutes before it puts"
    if facts.listed_ago_s > GRANT_S:
        return "failing", (
            f"what the fleet has in the store was listed {facts.listed_ago_s / 60:.0f} minutes "
            "ago, and nothing is put until it is listed again; see whether the store answers "
            "listings"
        )
    if facts.is_full or facts.room_bytes == 0:
        return "full", (
            f"the fleet has used {facts.used_bytes} of the {capacity_bytes} bytes of "
            "--remote-capacity, and this host's part of the rest is used up until the next "
            "listing; raise it on all hosts, or let objects expire sooner with --remote-ttl"
        )
    return "serving", ""


def _told(code: str, text: str) -> tuple[str, str]:
    state = _OF_CODE.get(code, "failing")
    return state, f"{text}; {_ADVICE[state]}"
