"""`kvwarehouse export`: what a daemon has stored, as a file or a stream."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from kvwarehouse.backup import BackupWriter, Export, ExportCounts, new_file
from kvwarehouse.cli.backup_flags import PIPE, add_rate, follow, rate_from, refuse_terminal
from kvwarehouse.cli.connection import add_connection, connect_from, find_namespace
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, print_json
from kvwarehouse.client import Client
from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.errors import StorageError, UsageError
from kvwarehouse.sizes import format_size

EXAMPLES = """\
  kvwarehouse export -o monday.kvw                  all namespaces, into one file
  kvwarehouse export --namespace my-model 3f2c -o two.kvw
  kvwarehouse export -o - | ssh other kvwarehouse import -
  kvwarehouse export --tier dram --limit-rate 200MiB -o warm.kvw

The daemon goes on serving. A namespace is written as it is when its turn comes; what is evicted
before it is read is left out, with the pages behind it, and counted. So is all that is not written
yet of a namespace that is cleared. Every page is verified when it is read, and has a digest in the
file. The file is readable by its owner alone, and is there under its name once it is whole; what
was there before stays until then. It is a tar archive, and has KV and token ids as they are, but no
salt and no key: they are made anew where it is imported.

What it costs: each page that is read from DRAM counts as used, so that afterwards the order of
eviction is that of the export, until engines use pages again. On the daemon's host pages on NVMe
are read past DRAM. Elsewhere (--address host:port) they are promoted, and push what is coldest out
of DRAM: use --tier dram, or a --limit-rate so low that what engines use is used again in time.

Exit status 0: whole. 4: whole, but pages were left out because no copy of them was good any more
(see `kvwarehouse check`).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="Where to; - for the standard output. A file that is there is replaced at the end.",
    )
    parser.add_argument(
        "--namespace",
        nargs="+",
        action="extend",
        metavar="NAMESPACE",
        help="Only these: the beginning of an id (see `kvwarehouse ls`), or a model's name."
        " Default: all.",
    )
    parser.add_argument(
        "--tier",
        choices=("all", "dram"),
        default="all",
        help="dram: without pages that are on NVMe alone; none is promoted (default: all).",
    )
    add_rate(parser)
    add_connection(parser, timeout_s=30.0)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.json and args.output == PIPE:
        raise UsageError("--json and the backup cannot both be printed; use -o FILE")
    rate = rate_from(args)
    with connect_from(args, moves_pages=True) as client:
        spaces = _selected(client, args.namespace)
        tier = None if args.tier == "all" else str(args.tier)
        export = Export(client, tier=tier, rate=rate, timeout_s=args.timeout)
        warehouse_id = client.status()["core"]["warehouse_id"]
        with _output(args.output) as file:
            writer = BackupWriter(file, warehouse_id, spaces)
            follow(export.run(writer, spaces), _progress)
            writer.end()
    _show(export.counts, writer.written_bytes, args)
    return Exit.FOUND if export.counts.left_out["damaged"] else Exit.OK


def _selected(client: Client, names: list[str] | None) -> list[StoredNamespace]:
    if names is None:
        return client.namespaces()
    found = [find_namespace(client, name) for name in names]
    return list({each.id: each for each in found}.values())


@contextmanager
def _output(path: str) -> Iterator[BinaryIO]:
    if path != PIPE:
        with new_file(path) as file:
            yield file
        return
    refuse_terminal(sys.stdout, "a backup is nothing for a terminal; use -o FILE, or a pipe")
    try:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except OSError as error:
        # Not as for other commands: whoever reads a backup wants all of it. The interpreter must
        # not complain at its end of what could not be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise StorageError(
            f"the backup cannot be written to the standard output: {error.strerror}; look at what"
            " reads it",
            code="backup_unwritable",
        ) from error


def _progress(counts: ExportCounts) -> str:
    return (
        f"exporting: {counts.pages:,} of {counts.planned:,} pages,"
        f" {format_size(counts.payload_bytes)}"
    )


def _show(counts: ExportCounts, written_bytes: int, args: argparse.Namespace) -> None:
    if args.json:
        print_json(_plain(counts, written_bytes))
        return
    # In a pipe the standard output is the backup.
    stream = sys.stderr if args.output == PIPE else sys.stdout
    print(
        f"exported {counts.pages:,} pages ({format_size(counts.payload_bytes)}) of"
        f" {counts.namespaces:,} namespaces",
        file=stream,
    )
    for reason, pages in sorted(counts.left_out.items()):
        print(f"left out: {pages:,} pages, {_LEFT_OUT[reason]}", file=stream)


_LEFT_OUT = {
    "gone": "which were evicted or cleared meanwhile",
    "damaged": "of which no copy is what was stored; see `kvwarehouse check`",
    "not_in_dram": "which are on NVMe alone",
    "no_parent": "of whose prompts an earlier page is missing or was left out",
}


def _plain(counts: ExportCounts, written_bytes: int) -> dict[str, Any]:
    return {
        "namespaces": counts.namespaces,
        "pages": counts.pages,
        "payload_bytes": counts.payload_bytes,
        "file_bytes": written_bytes,
        "left_out": {reason: counts.left_out[reason] for reason in _LEFT_OUT},
    }
