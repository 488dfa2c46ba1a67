"""The namespaces of a backup at the daemon that takes it: opened, or refused in words before
anything is stored, and watched for clears. One owner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvwarehouse.backup.backup_file import BackupNamespace
from kvwarehouse.client import Client, OpenNamespace
from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.client.listed import open_listed
from kvwarehouse.errors import UsageError
from kvwarehouse.types import Namespace

_NAMES: Final = ("model", "cache_group", "adapter", "salt")
"""By which people call a namespace; what else differs makes KV that does not fit."""

_NO_EPOCH: Final = -1


class Target:
    """Raises UsageError: code "namespace_differs" where the daemon knows one of the same name that
    the backup does not have (beside=True takes it nevertheless), "salted" where a salt is needed
    that is not among `salts`, and what opening them raises."""

    def __init__(
        self,
        client: Client,
        namespaces: Mapping[bytes, BackupNamespace],
        *,
        salts: Sequence[str] = (),
        beside: bool = False,
    ) -> None:
        self._client = client
        known = {each.id: each for each in client.namespaces()}
        others = [each for each in known.values() if each.id not in namespaces]
        spaces = {each.id: _with_salt(each, salts) for each in namespaces.values()}
        for each in namespaces.values():
            if each.id in known:
                continue
            if spaces[each.id] is None:
                raise _salted(each)
            if not beside:
                _refuse_other(each, others)
        for space in spaces.values():
            if space is not None:  # else the daemon has it, and its salt is not needed
                client.open(space, reopen=False)
        listed = {each.id: each for each in client.namespaces()}
        there = [listed[each] for each in namespaces if each in listed]
        self._opened = {each.id: open_listed(client, each) for each in there}
        self._epochs = {each.id: known.get(each.id, each).clear_epoch for each in there}
        self._cleared = set(namespaces) - set(self._opened)

    def opened(self, namespace_id: bytes) -> OpenNamespace:
        return self._opened[namespace_id]

    def epoch(self, namespace_id: bytes) -> int:
        """Its clear epoch at the beginning: what is stored belongs to it."""
        return self._epochs[namespace_id]

    def is_cleared(self, namespace_id: bytes) -> bool:
        """Whether it was cleared or forgotten since the beginning; asks the daemon."""
        if namespace_id not in self._cleared:
            now = {each.id: each.clear_epoch for each in self._client.namespaces()}
            if now.get(namespace_id, _NO_EPOCH) != self._epochs[namespace_id]:
                self._cleared.add(namespace_id)
        return namespace_id in self._cleared


def _with_salt(namespace: BackupNamespace, salts: Sequence[str]) -> Namespace | None:
    """None where none of these is its salt."""
    space = Namespace.from_fields(namespace.fields)
    candidates = (space, *(dataclasses.replace(space, salt=salt) for salt in salts))
    return next((each for each in candidates if each.id == namespace.id), None)


def _salted(namespace: BackupNamespace) -> UsageError:
    return UsageError(
        f"namespace {namespace.id.hex()[:12]} of the backup ({namespace.fields['model']}) has the"
        f" salt {namespace.fields['salt']}, of which a backup has no more than this digest, and"
        " this daemon does not know the namespace: let the engine with the salt connect here first,"
        " or give --salt-file with the salt on a line of its own",
        code="salted",
    )


def _refuse_other(new: BackupNamespace, others: Sequence[StoredNamespace]) -> None:
    """Where the name is taken: what engines of the target look for is something else."""
    for other in others:
        if _name(other.fields) != _name(new.fields):
            continue
        raise UsageError(
            f"namespace {new.id.hex()[:12]} of the backup ({new.fields['model']}) differs from"
            f" {other.id.hex()[:12]}, which this daemon has under the same name:"
            f" {_differences(new.fields, other.fields)}. Engines that use the one find no page of"
            " the other; export from a daemon whose engines are as those here, or give --beside to"
            " keep both",
            code="namespace_differs",
            context={"namespace": new.id.hex(), "there": other.id.hex()},
        )


def _name(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(fields[name] for name in _NAMES)


def _differences(new: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    names = [name for name in new if new[name] != other.get(name)]
    return "; ".join(
        f"{name} is {_shown(new[name])} in the backup and {_shown(other.get(name))} here"
        for name in names
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
