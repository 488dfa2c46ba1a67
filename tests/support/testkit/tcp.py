"""gRPC over TCP in tests: a certificate, tokens, and calls that say one."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvwarehouse import errors, wire
from testkit.served import Served

T = 30.0
TOKEN = "0123456789abcdef0123456789abcdef"
OTHER = "fedcba9876543210fedcba9876543210"


def made_certificate(folder: Path, days: int = 30) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program to make a certificate")
    folder.mkdir(exist_ok=True)
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
        "-nodes", "-days", str(days), "-subj", "/CN=localhost",
        "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout", str(key), "-out", str(cert),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    key.chmod(0o600)
    return str(cert), str(key)


def port_of(served: Served) -> int:
    return int(served.events("ready")[0]["listen"].rpartition(":")[2])


def channel(served: Served, cert: str | None, host: str = "localhost") -> grpc.Channel:
    address = f"{host}:{port_of(served)}"
    options = [*wire.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    if cert is None:
        return grpc.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(Path(cert).read_bytes())
    return grpc.secure_channel(address, credentials, options=options)


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def failed(call: Any) -> tuple[grpc.StatusCode, errors.WarehouseError]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), wire.error_from_rpc(caught.value, address="test")


def refused(served: Served, reason: str) -> int:
    """Calls and connections, by the daemon's metrics."""
    page = served.get("/metrics")[1]
    line = f'kvwarehouse_refused_calls_total{{reason="{reason}"}} '
    return int(page.partition(line)[2].partition("\n")[0])


def needs_ipv6() -> None:
    """Skips the test on a host without loopback of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
