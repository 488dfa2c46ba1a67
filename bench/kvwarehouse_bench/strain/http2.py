"""HTTP/2 and gRPC by hand (RFC 9113, RFC 7541), for calls that no library makes. Stateless;
thread-safe."""

from __future__ import annotations

from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def call_head(stream: int, method: str, token: str = "") -> bytes:
    """Opens a call of gRPC: "/service/method"."""
    fields = {
        ":method": "POST", ":scheme": "http", ":path": method, ":authority": "there",
        "te": "trailers", "content-type": "application/grpc",
    }  # fmt: skip
    if token:
        fields["authorization"] = f"Bearer {token}"
    block = b"".join(
        b"\0" + _text(name.encode()) + _text(value.encode()) for name, value in fields.items()
    )
    return frame(HEADERS, END_HEADERS, stream, block)


def call_data(stream: int, message: bytes, *, ends: bool = True) -> bytes:
    """A whole message of a call."""
    prefixed = b"\0" + len(message).to_bytes(4, "big") + message
    return frame(DATA, END_STREAM if ends else 0, stream, prefixed)


def _text(value: bytes) -> bytes:
    """As a literal; shorter than 127 bytes."""
    return bytes([len(value)]) + value
