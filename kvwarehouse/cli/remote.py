"""`kvwarehouse remote`: the store that the daemons of a fleet share."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from kvwarehouse import config
from kvwarehouse.cli.backup_flags import follow
from kvwarehouse.cli.connection import add_connection, connect_from, is_chosen
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, print_json, print_table
from kvwarehouse.cli.status import remote_rows
from kvwarehouse.config import FleetPlace
from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.fleet import FleetSecret
from kvwarehouse.remote import lifecycle
from kvwarehouse.remote.lifecycle import LifecycleRule, lifecycle_rule
from kvwarehouse.remote.names import FleetNames
from kvwarehouse.remote.nodes import DAY_MS
from kvwarehouse.remote.object_store import ObjectStore, StoreSettings, open_store
from kvwarehouse.remote.survey import Judged, Survey
from kvwarehouse.remote.sweep import Sweep, SweepRules, days_too_many
from kvwarehouse.remote.trial import StoreTrial, TrialResult
from kvwarehouse.sizes import format_size

EXAMPLES = """\
  kvwarehouse remote init --remote s3://kv/prod --fleet-secret secret      before the first daemon
  kvwarehouse remote check --config /etc/kvwarehouse.toml --objects 500    the daemon's own store
  kvwarehouse remote status                       what this host's daemon says of it
  kvwarehouse remote gc --config /etc/kvwarehouse.toml --dry-run

init    tries each call that a daemon makes, and says how to set the rule by which the store itself
        deletes what is old, for when no daemon lives that would. Sets nothing and leaves nothing.
check   tries the same, compares clocks, counts objects and bytes by day and namespace, and verifies
        a sample of objects as a reader would: headers, place, keys, and the digest of each page.
status  asks the daemon for its remote part: state, reason, what it put and read.
gc      deletes what a daemon's janitor would: days beyond --remote-ttl; with --remote-capacity the
        oldest days above 95 % of it, never today's; what was cleared an hour ago; what daemons left
        that are gone. Never what has no name of this fleet's. As often as you like, also while
        daemons do the same.

init, check and gc open the store themselves, with this shell's credentials, and put one small
object that they delete again: by it they know the store's clock. Where the store takes no put, gc
takes the time of the newest object that is there, and check counts and verifies all the same.
Settings: flags, over environment (KVW_REMOTE=...), over the file of --config.

Exit status 0: all is well. 3: what was asked does not answer any more. 4: an object of the sample
is damaged, or one of the calls that a daemon makes does not work: the table says which, and why.
"""

_ACTIONS: Final = ("init", "status", "check", "gc")
_OBJECTS: Final = 64
_PATIENT_S: Final = 60.0


@dataclass(frozen=True)
class _OpenStore:
    place: FleetPlace
    secret: FleetSecret
    names: FleetNames
    store: ObjectStore
    """With the deadlines of a daemon's."""
    patient: ObjectStore
    """The same place; a call may take its time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", metavar="ACTION", choices=_ACTIONS, help="init, status, check or gc; see below."
    )
    parser.add_argument(
        "--objects",
        type=int,
        metavar="COUNT",
        help=f"check: how many objects it verifies (default: {_OBJECTS}).",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="gc: say what would go, and delete nothing."
    )
    config.add_place_flags(parser.add_argument_group("which store (init, check, gc)"))
    add_connection(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    _refuse_what_does_not_fit(args)
    if args.action == "status":
        return _status(args)
    opened = _open(args)
    return {"init": _init, "check": _check, "gc": _gc}[args.action](opened, args)


def _refuse_what_does_not_fit(args: argparse.Namespace) -> None:
    if args.objects is not None and args.action != "check":
        raise UsageError("--objects is for `kvwarehouse remote check`; leave it out")
    if args.objects is not None and args.objects < 0:
        raise UsageError(f"--objects {args.objects} is no count; use 0 or more")
    if args.dry_run and args.action != "gc":
        raise UsageError("--dry-run is for `kvwarehouse remote gc`; leave it out")
    if is_chosen(args) and args.action != "status":
        raise UsageError(
            f"{args.action} asks the store and no daemon; leave --address, --socket and --name out"
        )


def _open(args: argparse.Namespace) -> _OpenStore:
    place = config.load_place(vars(args))
    secret = FleetSecret.read(place.fleet_secret)
    settings = StoreSettings.of(place.url, place.remote_file)
    patient = replace(settings, get_s=_PATIENT_S, put_s=_PATIENT_S)
    names = FleetNames(secret.fleet_id)
    return _OpenStore(place, secret, names, open_store(settings), open_store(patient))


# --- init


def _init(opened: _OpenStore, args: argparse.Namespace) -> int:
    tried = StoreTrial(opened.store, opened.names).run()
    rule = lifecycle_rule(opened.place.url, opened.names, opened.place.ttl_days)
    if args.json:
        print_json({**_plain_trial(opened, tried), "lifecycle": _plain_rule(rule)})
    else:
        _print_trial(opened, tried)
        if tried.works:
            _print_rule(rule)
    return Exit.OK if tried.works else Exit.FOUND


def _plain_trial(opened: _OpenStore, tried: TrialResult) -> dict[str, Any]:
    able = tried.abilities
    return {
        "url": opened.place.url,
        "fleet": opened.names.fleet,
        "works": tried.works,
        "calls": {each.call: each.problem or "ok" for each in tried.calls},
        "put_if_absent": able.put_if_absent if able else None,
        "clock_ahead_s": round(able.clock_ahead_s, 1) if able else None,
    }


def _print_trial(opened: _OpenStore, tried: TrialResult) -> None:
    rows = [("store", opened.place.url), ("fleet", opened.names.fleet.hex())]
    rows += [(each.call, each.problem or "works") for each in tried.calls]
    if tried.abilities:
        heeds = "heeded" if tried.abilities.put_if_absent else "not heeded, and not needed"
        rows += [
            ("put if absent", heeds),
            ("clock", f"{round(tried.abilities.clock_ahead_s):+,} s of this host's"),
        ]
    print_table("", ("", ""), rows)
    if not tried.works:
        print("a daemon would put nothing here: see docs/shared.md for what a store has to allow")


def _plain_rule(rule: LifecycleRule) -> dict[str, Any]:
    return {"days": rule.days, "rule": dict(rule.rule), "command": rule.command, "note": rule.note}


def _print_rule(rule: LifecycleRule) -> None:
    print(f"\nWhat nobody used for {rule.days} days the store may delete by itself:")
    if rule.rule:
        print(f"write this into {lifecycle.RULE_FILE}, and run the command below it\n")
        print_json(dict(rule.rule))
    print(f"\n  {rule.command}\n\n{rule.note}.")


# --- status


def _status(args: argparse.Namespace) -> int:
    with connect_from(args) as client:
        status = client.status()
    remote = status.get("remote") or {}
    core = status["core"]
    if args.json:
        waits = {"queue": core["remote_puts"], "fetches": core["remote_fetches"]}
        print_json({"remote": remote, **waits})
    elif not remote.get("state"):
        print("this daemon has no remote tier; `kvwarehouse serve --remote URL` gives it one")
    else:
        print_table("", ("", ""), remote_rows(remote, core))
    return Exit.OK


# --- check


def _check(opened: _OpenStore, args: argparse.Namespace) -> int:
    tried = StoreTrial(opened.store, opened.names).run()
    count = _OBJECTS if args.objects is None else args.objects
    survey = Survey(opened.patient, opened.names, opened.secret, count)
    judged: list[Judged] = []
    surveyed = True
    try:
        follow(_surveyed(survey, judged), str)
    except TransportError:
        if tried.works:
            raise
        surveyed = False  # the trial has what the store said
    if args.json:
        plain = _plain_survey(survey, judged) if surveyed else {}
        print_json({**_plain_trial(opened, tried), **plain})
    else:
        _print_trial(opened, tried)
        if surveyed:
            _print_survey(opened, survey, judged)
    damaged = any(each.is_damaged for each in judged)
    return Exit.OK if tried.works and not damaged else Exit.FOUND


def _surveyed(survey: Survey, judged: list[Judged]) -> Iterator[str]:
    """Does it all, and says how far it is."""
    for seen in survey.count():
        yield f"listing: {seen:,} objects"
    for each in survey.verify():
        judged.append(each)
        read = format_size(sum(one.size_bytes for one in judged))
        yield f"verifying: {len(judged):,} objects, {read}"


def _plain_survey(survey: Survey, judged: list[Judged]) -> dict[str, Any]:
    whole = survey.totals.whole()
    return {
        "objects": whole.objects,
        "bytes": whole.bytes,
        "unknown_names": survey.unknown,
        "days": {
            _date(day): {"objects": total.objects, "bytes": total.bytes}
            for day, total in survey.totals.by_day().items()
        },
        "namespaces": {
            space.hex(): {
                _date(day): {"objects": total.objects, "bytes": total.bytes}
                for day, total in days.items()
            }
            for space, days in survey.totals.by_namespace().items()
        },
        "verified": {
            "objects": len(judged),
            "bytes": sum(each.size_bytes for each in judged),
            "pages": sum(each.pages for each in judged),
            "gone": sum(each.fault == "gone" for each in judged),
            "damaged": sum(each.is_damaged for each in judged),
        },
        "damaged": [
            {"namespace": each.name.namespace, "key": each.name.key, "day": _date(each.name.day),
             "fault": each.fault, "good_pages": each.pages}
            for each in judged
            if each.is_damaged
        ],
    }  # fmt: skip


def _print_survey(opened: _OpenStore, survey: Survey, judged: list[Judged]) -> None:
    rows = [
        (space.hex()[:12], _date(day), total.objects, format_size(total.bytes))
        for space, days in survey.totals.by_namespace().items()
        for day, total in days.items()
    ]
    whole = survey.totals.whole()
    rows.append(("all", "", whole.objects, format_size(whole.bytes)))
    print_table("", ("namespace", "day", ">objects", ">size"), rows)
    if survey.unknown:
        print(f"{survey.unknown:,} objects among them have names that are none of the fleet's")
    damaged = [each for each in judged if each.is_damaged]
    if damaged:
        print_table(
            "",
            ("damaged object", "fault", ">good pages before it"),
            [(opened.names.pages(each.name), each.fault, each.pages) for each in damaged],
        )
    read = format_size(sum(each.size_bytes for each in judged))
    print(
        f"verified {len(judged):,} of {whole.objects:,} objects ({read}): {len(damaged):,} damaged,"
        f" {sum(each.fault == 'gone' for each in judged):,} deleted meanwhile"
    )
    if damaged:
        print("no daemon believes a damaged object, and its day takes it; look at the store")


def _date(day: int) -> str:
    """Of a day since 1970; the number where no calendar has it."""
    try:
        return time.strftime("%Y-%m-%d", time.gmtime(day * 86400))
    except (OverflowError, ValueError):
        return str(day)


# --- gc


def _gc(opened: _OpenStore, args: argparse.Namespace) -> int:
    place, names, store = opened.place, opened.names, opened.patient
    now_ms = int(_store_time_s(store, names) * 1000)
    too_many: set[int] = set()
    if place.capacity_bytes:
        survey = Survey(store, names, opened.secret, 0)
        follow(survey.count(), lambda seen: f"listing: {seen:,} objects")
        of_days = {day: total.bytes for day, total in survey.totals.by_day().items()}
        too_many = days_too_many(of_days, now_ms // DAY_MS, place.ttl_days, place.capacity_bytes)
    rules = SweepRules(now_ms, place.ttl_days, too_many, args.dry_run)
    sweep = Sweep(store, names, rules)
    try:
        follow(_swept(sweep, "would go" if args.dry_run else "deleted"), str)
    except TransportError as error:
        would = "would go" if args.dry_run else "are deleted"
        done = f"{sweep.swept.objects.total():,} objects {would}; run it again"
        raise TransportError(
            f"{error.message}. {done}", code=error.code, context=error.context
        ) from error
    _show_swept(sweep, too_many, args)
    return Exit.OK


def _store_time_s(store: ObjectStore, names: FleetNames) -> float:
    """By the store's clock. Where it takes no put, being full, that of its newest object. It
    is later by now, so nothing goes that would stay."""
    try:
        return time.time() + store.probe(names.probes_prefix).clock_ahead_s
    except TransportError as error:
        for prefix in (names.nodes_prefix, names.root):
            newest_s = max((item.modified_s for item in store.list(prefix)), default=None)
            if newest_s is not None:
                break
        else:
            raise
        told = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(newest_s))
        print(
            f"{error.message}. Days are judged as of {told} UTC, the time of the newest object",
            file=sys.stderr,
        )
        return newest_s


def _swept(sweep: Sweep, done: str) -> Iterator[str]:
    for _ in sweep.steps():
        yield f"{done}: {sweep.swept.objects.total():,} objects"


def _show_swept(sweep: Sweep, too_many: Iterable[int], args: argparse.Namespace) -> None:
    objects, freed = sweep.swept.objects, sweep.swept.pages_bytes
    if args.json:
        print_json(
            {
                "dry_run": args.dry_run,
                "objects": {what: objects[what] for what in _SWEPT},
                "pages_bytes": freed,
                "days_for_room": [_date(day) for day in sorted(too_many)],
            }
        )
        return
    would = "would delete" if args.dry_run else "deleted"
    print(f"{would} {objects['pages']:,} objects of pages ({format_size(freed)})")
    for day in sorted(too_many):
        print(f"of them the day {_date(day)}, for room")
    print(f"{would} {_rest(objects)} that daemons left")


_SWEPT: Final = ("pages", "markers", "deltas", "nodes", "turns", "probes")


def _rest(objects: Counter[str]) -> str:
    return ", ".join(f"{objects[what]:,} {what}" for what in _SWEPT[1:])
