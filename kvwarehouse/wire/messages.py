"""Conversions of the wire's messages: prefixes (token ids as packed little-endian uint32, or an
engine's own keys), and namespaces and status to and from kvwarehouse.types and plain dicts.

Stateless; thread-safe. A prefix is copied once in each direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.protobuf.message import Message

from kvwarehouse.errors import UsageError
from kvwarehouse.types import CHAIN_SCHEME, Namespace
from kvwarehouse.wire.generated import namespace_pb2
from kvwarehouse.wire.generated import warehouse_pb2 as pb
from kvwarehouse.wire.limits import MAX_KEY_BYTES, MAX_KEYS, MAX_TOKENS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PACKED: Final = "<u4"
_TOKEN_BYTES: Final = 4

M = TypeVar("M", bound=Message)


def prefix_to_wire(tokens: NDArray[Any] | None, keys: Sequence[bytes] | None) -> pb.Prefix:
    """`tokens`: one-dimensional unsigned or signed integers, already checked to be in range; or
    `keys`, one a page. Exactly one of them. Raises UsageError beyond the bounds of the wire."""
    if (tokens is None) == (keys is None):
        raise UsageError("a prefix is either tokens or keys, not both and not none of them")
    if tokens is not None:
        import numpy as np

        _check_count("too_many_tokens", "token ids", len(tokens), MAX_TOKENS)
        return pb.Prefix(tokens=np.ascontiguousarray(tokens, dtype=_PACKED).tobytes())
    assert keys is not None
    _check_keys(keys)
    return pb.Prefix(keys=pb.EngineKeys(keys=keys))


def prefix_from_wire(prefix: pb.Prefix) -> tuple[NDArray[np.uint32] | None, list[bytes] | None]:
    """(tokens, None) or (None, keys). Raises UsageError on a prefix that is absent, cut in the
    middle of a token, or beyond the bounds of the wire."""
    which = prefix.WhichOneof("by")
    if which == "tokens":
        import numpy as np

        if len(prefix.tokens) % _TOKEN_BYTES:
            raise UsageError(
                f"tokens has {len(prefix.tokens)} bytes, which is no whole number of packed uint32",
                code="bad_tokens",
            )
        tokens = np.frombuffer(prefix.tokens, dtype=_PACKED)
        _check_count("too_many_tokens", "token ids", len(tokens), MAX_TOKENS)
        return tokens, None
    if which == "keys":
        keys = list(prefix.keys.keys)
        _check_keys(keys)
        return None, keys
    raise UsageError(
        "the request has no prefix: set prefix.tokens or prefix.keys", code="no_prefix"
    )


def _check_keys(keys: Sequence[bytes]) -> None:
    _check_count("too_many_keys", "keys", len(keys), MAX_KEYS)
    for place, key in enumerate(keys):
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise UsageError(
                f"key {place} has {len(key)} bytes; an engine's key has 1 to {MAX_KEY_BYTES}",
                code="bad_key",
                context={"position": place, "bytes": len(key)},
            )


def _check_count(code: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise UsageError(
            f"a prefix of {count} {what} is over the bound of one call, {most}; pass a shorter one",
            code=code,
            context={"count": count, "most": most},
        )


def namespace_to_wire(space: Namespace) -> namespace_pb2.Namespace:
    return namespace_pb2.Namespace(**space.to_fields())


def namespace_from_wire(message: namespace_pb2.Namespace) -> Namespace:
    """Raises UsageError (code "bad_namespace") on fields out of range, and on fields that a newer
    client sent and this version does not know: dropping them would change what is shared."""
    if _has_unknown(message):
        raise UsageError(
            "the namespace has fields that this daemon does not know; upgrade the daemon",
            code="bad_namespace",
        )
    return Namespace.from_fields(fields_from_wire(message))


def fields_from_wire(message: namespace_pb2.Namespace) -> dict[str, Any]:
    """As Namespace.to_fields has them, and those only that this version knows."""
    fields = plain(message)
    return {**fields, "hash_scheme": fields["hash_scheme"] or CHAIN_SCHEME}


def plain(message: Message) -> dict[str, Any]:
    """A message as nested dicts and lists of plain values, every field present, by its names."""
    return {
        field.name: _plain_field(getattr(message, field.name), field)
        for field in message.DESCRIPTOR.fields
    }


def fill(message: M, values: Mapping[str, Any]) -> M:
    """The inverse of plain(): fields absent from `values` keep their defaults, and names the
    message does not have are left out, so that a core newer than its service still reports.
    Returns `message`."""
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
    return message


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
