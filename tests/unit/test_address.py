"""Addresses, and what may travel to them."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import pytest

from kvwarehouse import trusted_path
from kvwarehouse.client import endpoint
from kvwarehouse.client.endpoint import (
    MAX_PATH_BYTES,
    Address,
    Credentials,
    Endpoint,
    parse_address,
)
from kvwarehouse.client.listeners import Listener
from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse_bench.harness.process import free_port

STRANGER = 54321


@pytest.mark.parametrize(
    ("text", "address", "target"),
    [
        ("unix:///run/k.sock", Address(path="/run/k.sock"), "unix:/run/k.sock.grpc"),
        ("unix:/run/k.sock", Address(path="/run/k.sock"), "unix:/run/k.sock.grpc"),
        ("/run/k.sock", Address(path="/run/k.sock"), "unix:/run/k.sock.grpc"),
        ("gpu-7:7070", Address(host="gpu-7", port=7070), "gpu-7:7070"),
        ("[::1]:7070", Address(host="::1", port=7070), "[::1]:7070"),
    ],
)
def test_address_is_read_as_written(text: str, address: Address, target: str) -> None:
    assert parse_address(text) == address
    assert address.grpc_target == target


@pytest.mark.parametrize(
    "text",
    [
        "", "host", "host:", ":7070", "host:0", "host:65536", "host:port", "unix://", "unix://run/k",
        "unix:k.sock", "http://host:80", "a b:1", "user@host:1", "::1:7070", "unix:////k", "/k\x00",
        None, 7070, b"host:1", "/" + "x" * MAX_PATH_BYTES,
    ],
)  # fmt: skip
def test_address_is_refused_with_examples(text: Any) -> None:
    with pytest.raises(UsageError, match=r"unix:///run/kvwarehouse/kvw\.sock") as caught:
        parse_address(text)
    assert caught.value.code == "bad_address"


@pytest.mark.parametrize(
    ("address", "reason", "said"),
    [
        ("/run/k.sock", "connect failed: No such file", "kvwarehouse serve --socket /run/k.sock"),
        ("/run/k.sock", "Permission denied", "run as the daemon's user"),
        ("/run/k.sock", "Socket closed", "no daemon at"),
        ("gpu-7:7070", "Connection refused", "kvwarehouse serve --listen gpu-7:7070"),
        ("gpu-7:7070", "SSL: CERTIFICATE_VERIFY_FAILED: self signed", "certificate is not trusted"),
        ("gpu-7:7070", "WRONG_VERSION_NUMBER", "does not speak TLS"),
        ("gpu-7:7070", "last error: UNAVAILABLE: Socket closed", "may want TLS"),
    ],
)
def test_who_cannot_be_reached_is_said_to_be_missing_only_where_nobody_is(
    address: str, reason: str, said: str
) -> None:
    """Incident: "no daemon at ...; start one with ...", where one of another user ran."""
    text = parse_address(address).unreachable(reason)
    assert said in text
    assert reason in text
    assert ("start one with" in text) == ("no daemon at" in text)


@pytest.mark.parametrize(
    ("address", "needs_tls"),
    [("127.0.0.1:7070", False), ("localhost:7070", False), ("10.0.0.7:7070", True)],
)
def test_daemon_to_be_started_is_given_the_flags_that_it_does_not_start_without(
    address: str, needs_tls: bool
) -> None:
    text = parse_address(address).unreachable("Connection refused")
    assert "--token-file FILE" in text
    assert ("--tls-cert FILE --tls-key FILE" in text) == needs_tls


def test_longest_path_that_sockets_allow_is_taken() -> None:
    assert parse_address("/" + "x" * (MAX_PATH_BYTES - 1)).local


@pytest.mark.parametrize(
    ("address", "credentials"),
    [
        ("10.0.0.7:7070", Credentials()),
        ("10.0.0.7:7070", Credentials(token="secret")),
        ("127.a-name-of-anybody.example:7070", Credentials(token="secret")),
        ("/run/k.sock", Credentials(tls=True)),
        ("localhost:7070", Credentials(token="two\nlines")),
        ("localhost:7070", Credentials(token="schlüssel")),
    ],
)
def test_credentials_are_refused_where_they_would_leak_or_not_work(
    address: str, credentials: Credentials
) -> None:
    with pytest.raises(UsageError) as caught:
        credentials.check(parse_address(address))
    assert caught.value.code == "bad_credentials"


@pytest.mark.parametrize(
    ("address", "credentials"),
    [
        ("10.0.0.7:7070", Credentials(token="secret", tls=True)),
        ("localhost:7070", Credentials(token="secret")),
        ("127.0.0.9:7070", Credentials()),
        ("[::1]:7070", Credentials()),
        ("/run/k.sock", Credentials()),
    ],
)
def test_credentials_are_taken_where_nothing_leaks(address: str, credentials: Credentials) -> None:
    credentials.check(parse_address(address))


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Another user listens everywhere; what was asked about."""
    asked: list[tuple[str, ...]] = []

    def listeners_of(hosts: tuple[str, ...], port: int) -> list[Listener]:
        asked.append(hosts)
        return [Listener(ipaddress.ip_address(host), STRANGER) for host in hosts]

    monkeypatch.setattr(endpoint, "listeners_of", listeners_of)
    return asked


@pytest.mark.parametrize("address", ["127.0.0.1:7070", "[::1]:7070", "localhost:7070"])
def test_stranger_who_listens_on_loopback_is_refused_with_what_to_do(
    stranger: list[tuple[str, ...]], address: str
) -> None:
    with pytest.raises(TransportError, match=f"KVW_DAEMON_UID={STRANGER}, or use TLS") as caught:
        Endpoint(parse_address(address), Credentials(token="secret"), 1.0).target()
    assert caught.value.code == "daemon_untrusted"
    assert not caught.value.retryable
    assert ("place of localhost" in caught.value.message) == (address == "localhost:7070")


@pytest.mark.parametrize("named", ["", str(STRANGER)])
def test_number_of_all_users_of_another_namespace_is_nobodys_to_trust(
    stranger: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setattr(trusted_path, "outside", lambda: STRANGER)
    monkeypatch.setenv(endpoint.DAEMON_UID_VARIABLE, named)
    with pytest.raises(TransportError, match="or use TLS") as caught:
        Endpoint(parse_address("127.0.0.1:7070"), Credentials(token="secret"), 1.0).target()
    assert caught.value.code == "daemon_untrusted"
    assert endpoint.DAEMON_UID_VARIABLE not in caught.value.message


def test_user_who_was_named_may_listen_on_loopback(
    stranger: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(endpoint.DAEMON_UID_VARIABLE, str(STRANGER))
    Endpoint(parse_address("localhost:7070"), Credentials(), 1.0).target()
    assert stranger == [("127.0.0.1", "::1")]


@pytest.mark.parametrize("address", ["localhost:7070", "10.0.0.7:7070"])
def test_with_tls_nobody_is_asked_who_listens(
    stranger: list[tuple[str, ...]], address: str
) -> None:
    there = Endpoint(parse_address(address), Credentials(tls=True), 1.0)
    there.target()
    there.refuse_stranger(connected=False)
    assert stranger == []


def test_who_listens_is_asked_for_each_connection_and_not_for_each_call(
    stranger: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(endpoint.DAEMON_UID_VARIABLE, str(STRANGER))
    monkeypatch.setattr(endpoint, "_JUDGED_FOR_S", 3600.0)
    there = Endpoint(parse_address("127.0.0.1:7070"), Credentials(), 1.0)
    there.target()
    for _ in range(9):
        there.refuse_stranger(connected=True)
    assert len(stranger) == 2  # once more as soon as it is there
    there.refuse_stranger(connected=False)
    assert len(stranger) == 3
    monkeypatch.setattr(endpoint, "_JUDGED_FOR_S", 0.0)
    there.refuse_stranger(connected=True)
    there.refuse_stranger(connected=True)
    assert len(stranger) == 5


def test_port_that_nobody_has_is_left_to_nobody_who_waits_for_it() -> None:
    """Incident: who took the port between the look and gRPC's connection got it."""
    with pytest.raises(TransportError, match="kvwarehouse serve") as caught:
        Endpoint(parse_address(f"127.0.0.1:{free_port()}"), Credentials(), 1.0).target()
    assert caught.value.code == "unavailable"
    assert caught.value.retryable


def test_listener_whom_the_kernel_does_not_show_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a packet filter that leads to a daemon in another network namespace."""
    monkeypatch.setattr(endpoint, "listeners_of", lambda hosts, port: [])
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert Endpoint(parse_address(address), Credentials(), 1.0).target() == address
