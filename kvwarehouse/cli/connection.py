"""The arguments by which commands find their daemon and the namespace that they mean, and the
connecting itself.

The environment is read here for the client's own variables: KVW_ADDRESS (where), KVW_TOKEN (the
secret), and KVW_SOCKET and KVW_NAME, which say where this user's daemon listens. Whose daemon is
trusted beside ours and root's, KVW_DAEMON_UID, is read by every client
(kvwarehouse/client/endpoint.py). A namespace is named by the beginning of its id, or by its model's
name.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvwarehouse.client import Client, connect
from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.places import default_address, default_socket

_MOST_SHOWN = 8


def add_connection(parser: argparse.ArgumentParser, *, timeout_s: float = 10.0) -> None:
    group = parser.add_argument_group("which daemon")
    where = group.add_mutually_exclusive_group()
    where.add_argument(
        "--address",
        metavar="ADDRESS",
        help="unix:///path/kvw.sock, or host:port. Default: $KVW_ADDRESS, else the socket that"
        " `kvwarehouse serve` uses by default.",
    )
    where.add_argument("--socket", metavar="PATH", help="The same as --address unix://PATH.")
    where.add_argument(
        "--name",
        metavar="NAME",
        help="Your daemon that was started with this --name. Default: $KVW_NAME.",
    )
    group.add_argument(
        "--token-file",
        metavar="FILE",
        help="File with the token for a host:port. Default: $KVW_TOKEN.",
    )
    group.add_argument(
        "--tls",
        nargs="?",
        const=True,
        metavar="CA.pem",
        help="Use TLS for a host:port; CA.pem is the authority to trust, else the system's.",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=timeout_s,
        metavar="SECONDS",
        help=f"Bound of connecting and of every call (default: {timeout_s:g}).",
    )


def connect_from(
    args: argparse.Namespace,
    environ: Mapping[str, str] | None = None,
    *,
    moves_pages: bool = False,
) -> Client:
    """A client for administration: all of it is gRPC, so it takes no session of the daemon.
    moves_pages: one through which pages go, on the daemon's host by shared memory."""
    environ = os.environ if environ is None else environ
    address = address_from(args, environ)
    make = connect if moves_pages and is_local(address) else connect_grpc
    try:
        return make(
            address,
            token=None if is_local(address) else token_from(args.token_file, environ),
            tls=args.tls,
            timeout_s=args.timeout,
        )
    except TransportError as error:
        if error.code not in ("unavailable", "no_daemon") or is_chosen(args):
            raise
        raise TransportError(
            f"{error.message}. {_ELSEWHERE}", code=error.code, context=error.context
        ) from error


_ELSEWHERE: Final = (
    "One that was started with --name is found by the same --name (or KVW_NAME), any other by"
    " --socket with what the line `ready` of its log says"
)


def is_chosen(args: argparse.Namespace) -> bool:
    """Whether an argument says which daemon."""
    return any(given is not None for given in (args.address, args.socket, args.name))


def address_from(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """--address, --socket or --name, else the environment's, else the daemon's own default. Raises
    UsageError (code "bad_address") where one of the first three is empty."""
    for flag, given in (
        ("--address", args.address), ("--socket", args.socket), ("--name", args.name)
    ):  # fmt: skip
        refuse_empty(flag, given, without="the default daemon", code="bad_address")
    if args.address is not None:
        return str(args.address)
    if args.socket is not None:
        return f"unix://{os.path.abspath(args.socket)}"
    if args.name is not None:
        return f"unix://{default_socket(environ, args.name)}"
    return default_address(environ)


def refuse_empty(flag: str, given: str | None, *, without: str, code: str) -> None:
    """Empty text, as of a shell variable that is not set, names nothing; taken for no flag at all,
    it would send a command to another warehouse than the one that was meant."""
    if given == "":
        raise UsageError(
            f"{flag} is empty, as of a shell variable that is not set; say which, or leave it out"
            f" for {without}",
            code=code,
        )


def is_local(address: str) -> bool:
    """Whether it is a socket of this host."""
    return address.startswith(("unix:", "/"))


def token_from(path: str | None, environ: Mapping[str, str]) -> str | None:
    """The token in the file at `path`, else the environment's, else None."""
    if path is None:
        return environ.get("KVW_TOKEN") or None
    try:
        lines = Path(path).read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--token-file {path} cannot be read: {error}", code="bad_token"
        ) from error
    if not lines:
        raise UsageError(f"--token-file {path} is empty; write the token into it", code="bad_token")
    return lines[0]


def add_selection(parser: argparse.ArgumentParser, *, what: str) -> None:
    """NAMESPACE or --all, one of them."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument(
        "namespace",
        nargs="?",
        metavar="NAMESPACE",
        help="The beginning of its id (see `kvwarehouse ls`), or its model's name; one that begins"
        " with - goes behind a --.",
    )
    group.add_argument("--all", action="store_true", help=f"{what} all namespaces.")


def selected(client: Client, args: argparse.Namespace) -> StoredNamespace | None:
    """The namespace; None for all."""
    return None if args.all else find_namespace(client, args.namespace)


def find_namespace(client: Client, text: str) -> StoredNamespace:
    """Raises UsageError that lists the candidates when none or several fit. Empty text, as of a
    shell variable that is not set, fits none: it would begin every id."""
    known = client.namespaces()
    found = [each for each in known if text and each.id.hex().startswith(text.lower())]
    found = found or [each for each in known if each.fields["model"] == text]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(map(described, (found or known)[:_MOST_SHOWN]))
    problem = f"fits {len(found)} namespaces" if found else "is no namespace of this warehouse"
    raise UsageError(
        f"{text!r} {problem}; it has {listed or 'none'}; see `kvwarehouse ls`",
        code="unknown_namespace",
    )


def described(stored: StoredNamespace) -> str:
    model, salt = stored.fields["model"], stored.fields["salt"]
    return f"{stored.id.hex()[:12]} ({model}{f', salt={salt}' if salt else ''})"
