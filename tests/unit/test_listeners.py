"""Who listens at a port of this host, as the kernel tells it in two ways."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvwarehouse.client import listeners
from kvwarehouse.client.listeners import Listener, listeners_of

Listen = Callable[[str, int], int]


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Listens at an IP address, of IPv6 without that of IPv4, and says at which port."""
    with ExitStack() as stack:

        def listen(host: str, port: int = 0) -> int:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                at = stack.enter_context(socket.socket(family))
                if family == socket.AF_INET6:
                    at.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host == "::")
                at.bind((host, port))
            except OSError as error:
                if ":" not in host:
                    raise
                pytest.skip(f"no IPv6 here: {error}")
            at.listen()
            return int(at.getsockname()[1])

        yield listen


@pytest.fixture(params=["netlink", "proc"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is asked; the other is as where it is shut."""

    def shut(port: int) -> list[Listener]:
        raise PermissionError("not here")

    asked = listeners._by_netlink if request.param == "netlink" else listeners._by_proc
    try:
        asked(1)
    except OSError as error:
        pytest.skip(f"not to be asked here: {error}")
    other = "_by_proc" if request.param == "netlink" else "_by_netlink"
    monkeypatch.setattr(listeners, other, shut)


def found(host: str, port: int) -> list[tuple[str, int]]:
    return [(str(each.at), each.uid) for each in listeners_of([host], port)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("at", "asked", "shown"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1", "0.0.0.0"),
        ("::1", "::1", "::1"),
        ("::1", "0:0:0:0:0:0:0:1", "::1"),
        ("::", "::1", "::"),
        ("::", "127.0.0.1", "::"),  # whether it takes IPv4 too is not told
        ("::ffff:127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "::ffff:127.0.0.1", "127.0.0.1"),
    ],
)
def test_listener_of_an_address_is_found_wherever_it_listens(
    listen: Listen, at: str, asked: str, shown: str
) -> None:
    assert found(asked, listen(at, 0)) == [(shown, os.geteuid())]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("at", "asked"), [("127.0.0.1", "127.0.0.2"), ("127.0.0.1", "::1")])
def test_listener_of_another_address_is_not_found(listen: Listen, at: str, asked: str) -> None:
    assert found(asked, listen(at, 0)) == []


@pytest.mark.usefixtures("way")
def test_listener_of_the_address_itself_comes_before_those_of_all(listen: Listen) -> None:
    port = listen("127.0.0.1", 0)
    listen("::", port)
    assert found("127.0.0.1", port) == [("127.0.0.1", os.geteuid())]
    assert found("::1", port) == [("::", os.geteuid())]


@pytest.mark.usefixtures("way")
def test_connection_is_no_listener(listen: Listen) -> None:
    port = listen("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", port)) as connected:
        assert found("127.0.0.1", connected.getsockname()[1]) == []


@pytest.mark.parametrize(
    ("said", "errno_said"),
    [(struct.pack("=i", -errno.ENOENT), errno.ENOENT), (struct.pack("=i", 0), 0), (b"", 0)],
)
def test_list_of_nobody_is_believed_unless_it_ends_with_an_error(
    said: bytes, errno_said: int
) -> None:
    """Incident: a kernel without the handler of TCP says so where the list ends, and a stranger's
    port was taken for one that nobody has."""
    ours, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(said), 3, 2, 0, 0) + said)
        if not errno_said:
            assert list(listeners._dumped(ours, socket.AF_INET, 1)) == []
            return
        with pytest.raises(OSError, match=os.strerror(errno_said)) as caught:
            list(listeners._dumped(ours, socket.AF_INET, 1))
        assert caught.value.errno == errno_said


def test_nobody_is_found_where_nobody_tells(
    listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shut(port: int) -> list[Listener]:
        raise PermissionError("not here")

    for way in ("_by_netlink", "_by_proc"):
        monkeypatch.setattr(listeners, way, shut)
    assert found("127.0.0.1", listen("127.0.0.1", 0)) == []
