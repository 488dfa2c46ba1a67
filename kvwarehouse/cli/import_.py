"""`kvwarehouse import`: what `kvwarehouse export` wrote, into a daemon."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from kvwarehouse.backup import BackupReader, Import, ImportCounts, Target
from kvwarehouse.cli.backup_flags import PIPE, add_rate, follow, rate_from, refuse_terminal
from kvwarehouse.cli.connection import add_connection, connect_from
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, print_json
from kvwarehouse.errors import StorageError, UsageError
from kvwarehouse.sizes import format_size

EXAMPLES = """\
  kvwarehouse import monday.kvw
  kvwarehouse import monday.kvw --address other:7070 --tls ca.pem --token-file token
  kvwarehouse import monday.kvw --evict dram        into NVMe, by way of a full DRAM tier
  ssh other kvwarehouse export -o - | kvwarehouse import -

The target may be any warehouse. Each page is verified before any of it is stored, parents come
before children, and what is stored already is passed over: an import that ended early, for whatever
reason, is run again and goes on where it was. A damaged or cut file is refused where the damage
begins; what came before is right, and stays. Pages come in as engines' stores do: as the latest
used. `kvwarehouse flush` afterwards waits until they are on NVMe.

By default nothing is evicted for them: where free room ends in DRAM, on NVMe or in the index, no
more is stored, the rest of the file is verified, and the pages that are left are counted. What is
there is what engines use now, and a backup is what they used once. --evict dram lets DRAM's coldest
pages leave for them and stops where NVMe's room ends; --evict all does not stop.

A namespace that is cleared during the import stays cleared. If a namespace has the name of one of
the target's, and is of other weights or another shape, nothing is imported (--beside). Salts are
not in a backup: if the target does not know the namespace yet, --salt-file gives its salt.

Exit status 0: all of it is stored. 4: the file is whole, and pages are not stored: no room, cleared
meanwhile, or dropped by the daemon.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="A backup; - for the standard input.")
    parser.add_argument(
        "--evict",
        choices=("none", "dram", "all"),
        default="none",
        help="What may be evicted for it: nothing, the coldest pages of DRAM, or those of any tier"
        " (default: none).",
    )
    parser.add_argument(
        "--beside",
        action="store_true",
        help="Import namespaces beside those of the same name that differ.",
    )
    parser.add_argument(
        "--salt-file", metavar="FILE", help="Salts of namespaces that are new here, one a line."
    )
    add_rate(parser)
    add_connection(parser, timeout_s=30.0)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    rate, salts = rate_from(args), _salts(args.salt_file)
    with _input(args.file) as file, connect_from(args, moves_pages=True) as client:
        reader = BackupReader(file)
        target = Target(client, reader.namespaces, salts=salts, beside=args.beside)
        importing = Import(client, target, may_leave=args.evict, rate=rate, timeout_s=args.timeout)
        try:
            follow(importing.run(reader), _progress)
        except StorageError as error:
            counts = importing.counts
            done = f"{counts.stored:,} pages before that are stored, {counts.already:,} were there"
            raise StorageError(
                f"{error.message}. {done}", code=error.code, context=error.context
            ) from error
    _show(importing.counts, len(reader.namespaces), args)
    return Exit.OK if _is_complete(importing.counts) else Exit.FOUND


def _is_complete(counts: ImportCounts) -> bool:
    return not (counts.left or counts.cleared or counts.dropped)


@contextmanager
def _input(path: str) -> Iterator[BinaryIO]:
    if path == PIPE:
        refuse_terminal(sys.stdin, "a backup is nothing to be typed; give a FILE, or a pipe")
        yield sys.stdin.buffer
        return
    try:
        with Path(path).open("rb", buffering=1 << 20) as file:
            yield file
    except OSError as error:
        raise StorageError(
            f"the backup {path} cannot be read: {error.strerror}; give a file that `kvwarehouse"
            " export` wrote, on a disk that can be read",
            code="backup_unreadable",
            context={"path": path},
        ) from error


def _salts(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        return [line for line in Path(path).read_text("utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--salt-file {path} cannot be read: {error}", code="bad_salts") from error


def _progress(counts: ImportCounts) -> str:
    done = f"{counts.stored:,} stored, {counts.already:,} there already"
    left = f", {counts.left:,} without room" if counts.left else ""
    return f"importing: {counts.pages:,} pages, {format_size(counts.payload_bytes)}: {done}{left}"


def _show(counts: ImportCounts, namespaces: int, args: argparse.Namespace) -> None:
    if args.json:
        print_json(_plain(counts, namespaces))
        return
    print(
        f"imported {counts.stored:,} of {counts.pages:,} pages"
        f" ({format_size(counts.payload_bytes)}) of {namespaces:,} namespaces;"
        f" {counts.already:,} were there already"
    )
    if counts.left:
        print(
            f"left: {counts.left:,} pages, for which there is no free room; --evict says what may"
            " leave for them"
        )
    if counts.cleared:
        print(f"left: {counts.cleared:,} pages of namespaces that were cleared meanwhile")
    for reason, pages in sorted(counts.dropped.items()):
        print(f"left: {pages:,} pages, which the daemon did not store ({reason}); run it again")


def _plain(counts: ImportCounts, namespaces: int) -> dict[str, Any]:
    return {
        "namespaces": namespaces,
        "pages": counts.pages,
        "payload_bytes": counts.payload_bytes,
        "stored": counts.stored,
        "already": counts.already,
        "left": counts.left,
        "cleared": counts.cleared,
        "dropped": dict(counts.dropped),
    }
