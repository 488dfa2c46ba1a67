"""gRPC over TCP: TLS and tokens, with a real certificate."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvwarehouse import errors, wire
from kvwarehouse.daemon import admission, servers
from kvwarehouse.daemon.credentials import certificate_ends_at
from kvwarehouse.wire import warehouse_pb2 as pb
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.harness.process import free_port
from kvwarehouse_bench.strain import raw_protocols
from testkit.served import Served
from testkit.tcp import (
    OTHER,
    TOKEN,
    T,
    bearer,
    channel,
    failed,
    made_certificate,
    needs_ipv6,
    port_of,
    refused,
)


@pytest.fixture
def secure(tmp_path: Path, certificate: tuple[str, str], tokens: str) -> Iterator[Served]:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    shutil.copy(certificate[0], cert)
    shutil.copy(certificate[1], key)
    with Served(
        tmp_path, listen="0.0.0.0:0", tls_cert=cert, tls_key=key, token_file=tokens
    ) as served:
        yield served


@pytest.mark.parametrize("token", [TOKEN, OTHER])
def test_call_with_tls_and_a_token_of_the_file_is_served(
    secure: Served, certificate: tuple[str, str], token: str
) -> None:
    with channel(secure, certificate[0]) as there:
        stub = wire.WarehouseStub(there)
        assert stub.Status(pb.StatusRequest(), metadata=bearer(token), timeout=T).status.name


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        bearer(""),
        bearer(TOKEN[:-1]),
        bearer(TOKEN + "x"),
        bearer(TOKEN.upper()),
        bearer("é"),
        [("authorization", TOKEN)],
        [("authorization", f"Basic {TOKEN}")],
        [*bearer(TOKEN), *bearer(TOKEN)],
        [("x-authorization", f"Bearer {TOKEN}")],
    ],
    ids=lambda metadata: str(len(str(metadata))),
)
def test_call_without_exactly_one_right_token_is_refused_whatever_it_calls(
    secure: Served, certificate: tuple[str, str], metadata: list[tuple[str, str]]
) -> None:
    if any(not value.isascii() for _, value in metadata):
        metadata = [(key, value.encode("utf-8").decode("latin-1")) for key, value in metadata]
    with channel(secure, certificate[0]) as there:
        stub, health = wire.WarehouseStub(there), health_pb2_grpc.HealthStub(there)
        prefix = wire.prefix_to_wire(np.arange(4), None)
        calls: list[Any] = [
            lambda: stub.Status(pb.StatusRequest(), metadata=metadata, timeout=T),
            lambda: list(stub.Load(pb.LoadRequest(prefix=prefix), metadata=metadata, timeout=T)),
            lambda: stub.Store(iter([pb.StoreRequest()]), metadata=metadata, timeout=T),
            lambda: health.Check(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=T),
        ]
        for call in calls:
            try:
                status, error = failed(call)
            except ValueError:
                pytest.skip("gRPC's own client refuses to send this metadata")
            if status is grpc.StatusCode.INTERNAL:  # refused by gRPC before it reached us
                continue
            assert status is grpc.StatusCode.UNAUTHENTICATED
            assert error.code == "unauthenticated"
    assert TOKEN not in secure.log.getvalue()


def test_plaintext_client_of_a_tls_port_fails_and_leaves_the_daemon_up(
    secure: Served, certificate: tuple[str, str]
) -> None:
    with channel(secure, None) as plain:
        status, error = failed(
            lambda: wire.WarehouseStub(plain).Status(pb.StatusRequest(), timeout=T)
        )
        assert status is grpc.StatusCode.UNAVAILABLE
        assert isinstance(error, errors.TransportError)
    with socket.create_connection(("127.0.0.1", port_of(secure)), timeout=T) as raw:
        raw.sendall(np.random.default_rng(1).bytes(10_000))
    with channel(secure, certificate[0], "127.0.0.1") as there:
        wire.WarehouseStub(there).Status(pb.StatusRequest(), metadata=bearer(TOKEN), timeout=T)


def test_unix_socket_needs_no_token_even_when_tcp_does(secure: Served) -> None:
    secure.stub.Status(pb.StatusRequest(), timeout=T)


def test_loopback_without_tls_serves_and_asks_for_tokens(tmp_path: Path, tokens: str) -> None:
    with (
        Served(tmp_path, listen="127.0.0.1:0", token_file=tokens) as served,
        channel(served, None) as there,
    ):
        stub = wire.WarehouseStub(there)
        assert (
            failed(lambda: stub.Status(pb.StatusRequest(), timeout=T))[0]
            is grpc.StatusCode.UNAUTHENTICATED
        )
        stub.Status(pb.StatusRequest(), metadata=bearer(TOKEN), timeout=T)


def test_port_in_use_refuses_to_start_and_leaves_nothing_behind(
    tmp_path: Path, tokens: str
) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(errors.TransportError) as caught,
    ):
        Served(tmp_path, listen=address, token_file=tokens).start()
    assert caught.value.code == "address_unavailable"
    assert address in caught.value.message
    with Served(tmp_path, listen=address, token_file=tokens):
        pass


@pytest.mark.parametrize("taken_at", ["127.0.0.1", "::1"])
def test_localhost_is_refused_if_its_port_is_taken_at_one_address(
    tmp_path: Path, tokens: str, taken_at: str
) -> None:
    """Incident: another user had the port at [::1]. The daemon started at 127.0.0.1 alone, without
    a word, and clients went to the other."""
    needs_ipv6()
    family = socket.AF_INET6 if ":" in taken_at else socket.AF_INET
    port = free_port()
    with socket.create_server((taken_at, port), family=family):
        with pytest.raises(errors.TransportError) as caught:
            Served(tmp_path, listen=f"localhost:{port}", token_file=tokens).start()
        assert caught.value.code == "address_unavailable"
        assert taken_at in caught.value.message
    with Served(tmp_path, listen=f"localhost:{port}", token_file=tokens):
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=T).close()


def test_localhost_serves_tls_at_both_addresses_with_the_certificate_of_the_last_reload(
    tmp_path: Path, certificate: tuple[str, str], tokens: str
) -> None:
    """Incident: the second port was refused, as if its address were taken; and a new certificate
    would have reached the one alone that was called first."""
    needs_ipv6()
    tls = {"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}
    for ours, given in zip(tls.values(), certificate, strict=True):
        shutil.copy(given, ours)
    with Served(tmp_path, listen="localhost:0", token_file=tokens, **tls) as served:
        shown_at_both(served, certificate[0])
        for times in (1, 2):
            new = made_certificate(tmp_path / f"new{times}")
            replaced(served, [TOKEN], *new)
            reloaded(served, times)
            shown_at_both(served, new[0])


def reloaded(served: Served, times: int) -> None:
    """For so many times by now."""
    served.request_reload()
    eventually(lambda: len(served.events("reloaded")) == times, "it is reloaded")


def shown_at_both(served: Served, cert: str) -> None:
    """The certificate is what every client of localhost is shown."""
    for host in ("127.0.0.1", "::1") * 2:
        shown = ssl.get_server_certificate((host, port_of(served)), timeout=T)
        assert shown == Path(cert).read_text(), host


@pytest.mark.parametrize("listen", ["0.0.0.0", "[::]"])
def test_all_addresses_are_refused_if_the_port_is_taken_at_one(
    tmp_path: Path, certificate: tuple[str, str], tokens: str, listen: str
) -> None:
    needs_ipv6()
    port = free_port()
    tls = {"tls_cert": certificate[0], "tls_key": certificate[1], "token_file": tokens}
    with (
        socket.create_server(("::1", port), family=socket.AF_INET6),
        pytest.raises(errors.TransportError, match="already in use") as caught,
    ):
        Served(tmp_path, listen=f"{listen}:{port}", **tls).start()
    assert caught.value.code == "address_unavailable"


@pytest.mark.parametrize(
    "what", ["swapped", "missing", "encrypted", "other_key", "open_key", "foreign_key"]
)
def test_bad_tls_files_refuse_to_start(
    tmp_path: Path, certificate: tuple[str, str], tokens: str, what: str
) -> None:
    cert, key = certificate
    other = tmp_path / "other.pem"
    if what == "swapped":
        cert, key = key, cert
        Path(key).chmod(0o600)
    elif what == "missing":
        cert = str(tmp_path / "nowhere.pem")
    elif what == "open_key":
        other.write_bytes(Path(key).read_bytes())
        other.chmod(0o644)
        key = str(other)
    elif what == "foreign_key":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        other.write_bytes(Path(key).read_bytes())
        other.chmod(0o600)
        os.chown(other, 1001, -1)
        key = str(other)
    else:
        options = ["-aes256", "-pass", "pass:secret"] if what == "encrypted" else []
        command = ["openssl", "genpkey", "-algorithm", "RSA", *options, "-out", str(other)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        other.chmod(0o600)
        key = str(other)
    tls = {"tls_cert": cert, "tls_key": key, "token_file": tokens}
    with pytest.raises(errors.UsageError) as caught:
        Served(tmp_path, listen="127.0.0.1:0", **tls).start()
    assert key in caught.value.message or cert in caught.value.message


def until_ended(tmp_path: Path, tokens: str, said: bytes) -> None:
    """A connection that says that, and then nothing, is ended by the daemon."""
    with (
        Served(tmp_path, listen="127.0.0.1:0", token_file=tokens) as served,
        socket.create_connection(("127.0.0.1", port_of(served)), DEADLINE_S) as connection,
    ):
        connection.sendall(said)
        while connection.recv(1024):  # its greeting, then the end
            pass


def test_connection_that_says_nothing_is_ended(
    tmp_path: Path, tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "HANDSHAKE_S", 1.0)
    until_ended(tmp_path, tokens, b"")


def test_connection_without_a_call_is_ended(
    tmp_path: Path, tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "IDLE_S", 1.0)
    until_ended(
        tmp_path, tokens, raw_protocols.PREFACE + raw_protocols.frame(raw_protocols.SETTINGS, 0, 0)
    )


def test_silent_connections_are_told_and_keep_nobody_out_for_long(
    tmp_path: Path, tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CONNECTIONS_MAX", 8)
    look, all_came = admission.Connections.look, threading.Event()

    def look_at_all(connections: admission.Connections) -> None:
        """A look at some would end those beyond a share, and never see as many."""
        if all_came.is_set():
            look(connections)

    monkeypatch.setattr(admission.Connections, "look", look_at_all)
    with Served(tmp_path, listen="127.0.0.1:0", token_file=tokens) as served, ExitStack() as stack:
        where = ("127.0.0.1", port_of(served))
        for host in ["127.0.0.2", "127.0.0.3"] * 4:
            stack.enter_context(socket.create_connection(where, DEADLINE_S, (host, 0)))
        eventually(lambda: len(admission._taken_at(where[1])) == 8, "the daemon has taken all")
        all_came.set()

        def connected() -> float:
            service = served.stub.Status(pb.StatusRequest(), timeout=T).status.service
            return service.connections

        eventually(lambda: served.events("connections_near_bound"), "the log says it")
        assert served.events("connections_near_bound")[0]["count"] >= 7
        assert "kvwarehouse_grpc_connections " in served.get("/metrics")[1]

        eventually(lambda: served_to(served, None, TOKEN), "there is room again")
        eventually(lambda: connected() <= 1, "the silent ones are gone")
        assert len(served.events("connections_near_bound")) == 1


@pytest.mark.parametrize("kind", ["silent", "greeting"])
def test_host_without_a_token_keeps_half_of_the_connections(
    tmp_path: Path, tokens: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Incident: one host held all of them open, and nobody with a token came in."""
    monkeypatch.setattr(admission, "CONNECTIONS_MAX", 8)
    for name in ("HANDSHAKE_S", "IDLE_S"):
        monkeypatch.setattr(servers, name, 10 * DEADLINE_S)  # what makes room is the share alone
    said = raw_protocols.PREFACE + raw_protocols.frame(raw_protocols.SETTINGS, 0, 0)
    with (
        Served(tmp_path, listen="127.0.0.1:0", token_file=tokens) as served,
        ExitStack() as stack,
    ):
        where = ("127.0.0.1", port_of(served))
        for _ in range(12):
            bad = socket.create_connection(where, DEADLINE_S, ("127.0.0.2", 0))
            stack.enter_context(bad)
            if kind == "greeting":
                with suppress(OSError):
                    bad.sendall(said)

        eventually(lambda: served_to(served, None, TOKEN), "another host comes in")
        # Each is counted behind its end, which makes room.
        eventually(lambda: refused(served, "too_many_connections") >= 4, "those ended are counted")


def served_to(served: Served, cert: str | None, token: str) -> bool:
    with channel(served, cert) as there:
        try:
            wire.WarehouseStub(there).Status(pb.StatusRequest(), metadata=bearer(token), timeout=T)
        except grpc.RpcError:
            return False
        return True


def test_reload_takes_tokens_and_certificate_of_the_files(
    secure: Served, certificate: tuple[str, str], tmp_path: Path
) -> None:
    new_cert, new_key = made_certificate(tmp_path / "new")
    with channel(secure, certificate[0]) as there:
        stub = wire.WarehouseStub(there)
        stub.Status(pb.StatusRequest(), metadata=bearer(OTHER), timeout=T)
        replaced(secure, [TOKEN], new_cert, new_key)
        secure.request_reload()
        eventually(lambda: secure.events("reloaded"), "it is reloaded")
        # The connection stays; a token that was taken back does not.
        stub.Status(pb.StatusRequest(), metadata=bearer(TOKEN), timeout=T)
        status, _ = failed(
            lambda: stub.Status(pb.StatusRequest(), metadata=bearer(OTHER), timeout=T)
        )
        assert status is grpc.StatusCode.UNAUTHENTICATED
    assert served_to(secure, new_cert, TOKEN)
    assert not served_to(secure, certificate[0], TOKEN)


@pytest.mark.parametrize("bad", ["tokens", "certificate"])
def test_reload_of_a_file_that_cannot_be_used_keeps_all_old_ones(
    secure: Served, certificate: tuple[str, str], tmp_path: Path, bad: str
) -> None:
    new_cert, _new_key = made_certificate(tmp_path / "new")
    if bad == "tokens":
        replaced(secure, [], new_cert, _new_key)
    else:  # of another key
        replaced(secure, [TOKEN], new_cert, certificate[1])
    secure.request_reload()
    eventually(lambda: secure.events("reload_failed"), "the failure is told")
    event = secure.events("reload_failed")[0]
    assert event["level"] == "error"
    assert getattr(secure.config, "token_file" if bad == "tokens" else "tls_cert") in event["text"]
    assert served_to(secure, certificate[0], OTHER)
    assert not served_to(secure, new_cert, OTHER)


def replaced(served: Served, tokens: list[str], cert: str, key: str) -> None:
    """The files that `served` was given have this in them."""
    config = served.config
    Path(config.token_file).write_text("".join(f"{token}\n" for token in tokens))
    pair = Path(cert).read_bytes(), Path(key).read_bytes()
    Path(config.tls_cert).write_bytes(pair[0])
    Path(config.tls_key).write_bytes(pair[1])


@pytest.mark.parametrize(("days", "said"), [(30, False), (2, True), (0, True)])
def test_certificate_that_ends_soon_or_has_ended_is_said_at_the_start(
    tmp_path: Path, tokens: str, days: int, *, said: bool
) -> None:
    cert, key = made_certificate(tmp_path / "tls", days=max(days, 1))
    if days == 0:
        command = ["openssl", "x509", "-in", cert, "-days", "0", "-signkey", key, "-out", cert]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    with Served(
        tmp_path, listen="127.0.0.1:0", tls_cert=cert, tls_key=key, token_file=tokens
    ) as served:
        events = served.events("certificate_ends")
        assert bool(events) is said
        for event in events:
            assert (event["level"], event["path"]) == ("warning", cert)
            assert event["days"] in (days - 1, days)


@pytest.mark.parametrize("days", [2, 20_000])
def test_end_of_a_certificate_is_what_openssl_reads(tmp_path: Path, days: int) -> None:
    cert, _key = made_certificate(tmp_path / "tls", days)
    command = ["openssl", "x509", "-in", cert, "-noout", "-enddate"]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    ends = ssl.cert_time_to_seconds(told.strip().partition("=")[2])
    chain = Path(cert).read_bytes()
    assert certificate_ends_at(b"# first\n" + chain + chain).timestamp() == ends
    with pytest.raises(ValueError, match="empty"):
        certificate_ends_at(b"")


def test_refused_calls_are_counted_by_reason_and_told_in_a_line(
    tmp_path: Path, tokens: str
) -> None:
    with (
        Served(tmp_path, listen="127.0.0.1:0", token_file=tokens) as served,
        channel(served, None) as there,
    ):
        stub = wire.WarehouseStub(there)
        for metadata in ([], *[bearer(TOKEN + "x")] * 20):
            failed(lambda sent=metadata: stub.Status(pb.StatusRequest(), metadata=sent, timeout=T))
        page = served.get("/metrics")[1]
        assert 'kvwarehouse_refused_calls_total{reason="no_token"} 1\n' in page
        assert 'kvwarehouse_refused_calls_total{reason="bad_token"} 20\n' in page
        eventually(lambda: len(served.events("calls_refused")) >= 2, "the log tells both reasons")
        for event in served.events("calls_refused"):
            assert event["level"] == "warning"
            assert event["last_from"].startswith("ipv4:127.0.0.1:")
        assert {event["reason"] for event in served.events("calls_refused")} == {
            "no_token", "bad_token"
        }  # fmt: skip
