"""How many bytes a row of KV takes in a number format, with the scales that go with it.

Stateless; thread-safe. A *row* is what one scale may cover at most: the key or the value of one
head and token, or the latent vector of one token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvwarehouse.errors import UsageError


@dataclass(frozen=True)
class KvDtype:
    """`scale_group` is the elements that share a scale: 0 means one scale a tensor, which costs no
    bytes per token; PER_ROW means one a row."""

    name: str
    bits: int
    scale_group: int = 0
    scale_bytes: int = 0

    PER_ROW = -1

    def row_bytes(self, elements: int) -> int:
        return self.payload_bytes(elements) + self.scales_bytes(elements)

    def payload_bytes(self, elements: int) -> int:
        return -(-elements * self.bits // 8)

    def scales_bytes(self, elements: int) -> int:
        if self.scale_group == 0 or elements == 0:
            return 0
        group = elements if self.scale_group == self.PER_ROW else self.scale_group
        return -(-elements // group) * self.scale_bytes

    def describe(self) -> str:
        if self.scale_group == 0:
            scales = "no scales" if self.bits >= 16 else "one scale a tensor"
        elif self.scale_group == self.PER_ROW:
            scales = f"a {self.scale_bytes}-byte scale for each token, head, key and value"
        else:
            scales = f"a {self.scale_bytes}-byte scale for each {self.scale_group} elements"
        return f"{self.bits} bits an element, {scales}"


# Scales: one per tensor is the default of FP8 in engines; a 4-byte scale for each token and head is
# vLLM's *_per_token_head; a 2-byte scale for 32 elements is the Q4_0 block of llama.cpp.
DTYPES: dict[str, KvDtype] = {
    dtype.name: dtype
    for dtype in (
        KvDtype("fp32", 32),
        KvDtype("fp16", 16),
        KvDtype("bf16", 16),
        KvDtype("fp8", 8),
        KvDtype("int8", 8, scale_group=KvDtype.PER_ROW, scale_bytes=4),
        KvDtype("int4", 4, scale_group=32, scale_bytes=2),
    )
}


def find_dtype(
    name: str, *, scale_group: int | None = None, scale_bytes: int | None = None
) -> KvDtype:
    """The format, with other scales where they are given (`scale_group` 0: one a tensor). Raises
    UsageError for an unknown name or scales that cannot be."""
    dtype = DTYPES.get(name.lower())
    if dtype is None:
        raise UsageError(
            f"the dtype {name!r} is unknown; use one of {', '.join(DTYPES)}", code="unknown_dtype"
        )
    if scale_group is None and scale_bytes is None:
        return dtype
    group = dtype.scale_group if scale_group is None else scale_group
    size = (dtype.scale_bytes or 2) if scale_bytes is None else scale_bytes
    if group < KvDtype.PER_ROW or size < 1:
        raise UsageError(
            f"a scale of {size} bytes for {group} elements cannot be; use 1 byte or more, and 0"
            " elements for one scale a tensor or 1 and more",
            code="bad_scale",
        )
    return replace(dtype, scale_group=group, scale_bytes=size)
