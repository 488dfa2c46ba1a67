"""Which namespace a command means: by the beginning of its id, or by its model's name."""

from __future__ import annotations

import argparse

from kvwarehouse.client import Client
from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.errors import UsageError

_MOST_SHOWN = 8


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
