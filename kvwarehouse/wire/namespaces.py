"""Namespaces and status on the wire: messages to and from kvwarehouse.types and plain dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from kvwarehouse.errors import UsageError
from kvwarehouse.types import CHAIN_SCHEME, Namespace
from kvwarehouse.wire.generated import namespace_pb2 as pb


def namespace_to_wire(space: Namespace) -> pb.Namespace:
    return pb.Namespace(**space.to_fields())


def namespace_from_wire(message: pb.Namespace) -> Namespace:
    """Raises UsageError (code "bad_namespace") on fields out of range, and on fields that a newer
    client sent and this version does not know: dropping them would change what is shared."""
    if _has_unknown(message):
        raise UsageError(
            "the namespace has fields that this daemon does not know; upgrade the daemon",
            code="bad_namespace",
        )
    return Namespace.from_fields(fields_from_wire(message))


def fields_from_wire(message: pb.Namespace) -> dict[str, Any]:
    """As Namespace.to_fields has them, and those only that this version knows."""
    fields = plain(message)
    return {**fields, "hash_scheme": fields["hash_scheme"] or CHAIN_SCHEME}


def plain(message: Message) -> dict[str, Any]:
    """A message as nested dicts and lists of plain values, every field present, by its names."""
    return {
        field.name: _plain_field(getattr(message, field.name), field)
        for field in message.DESCRIPTOR.fields
    }


def fill(message: Message, values: Mapping[str, Any]) -> None:
    """The inverse of plain(): fields absent from `values` keep their defaults, and names the
    message does not have are left out, so that a core newer than its service still reports."""
    for field in message.DESCRIPTOR.fields:
        value = values.get(field.name)
        if value is None:
            continue
        target = getattr(message, field.name)
        if _is_map(field):
            target.update(value)
        elif field.is_repeated and field.message_type:
            for entry in value:
                fill(target.add(), entry)
        elif field.is_repeated:
            target.extend(value)
        elif field.message_type:
            fill(target, value)
        else:
            setattr(message, field.name, value)


def _plain_field(value: Any, field: Any) -> Any:
    if _is_map(field):
        return dict(value)
    if field.is_repeated:
        return [plain(entry) for entry in value] if field.message_type else list(value)
    return plain(value) if field.message_type else value


def _is_map(field: Any) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def _has_unknown(message: Message) -> bool:
    # A copy without them is shorter: the runtime has no public way to ask in all versions.
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()  # type: ignore[attr-defined, unused-ignore]
    return known.ByteSize() != message.ByteSize()
