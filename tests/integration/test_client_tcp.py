"""A client of another host: TLS, tokens, and the same answers as at home."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvwarehouse as kvw
import kvwarehouse.aio
from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.client.connect import connect_grpc
from testkit.served import Served
from testkit.tcp import TOKEN, T

SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=65536
)


@pytest.fixture
def address(tmp_path: Path, certificate: tuple[str, str], tokens: str) -> Iterator[str]:
    cert, key = certificate
    tls = {"tls_cert": cert, "tls_key": key, "token_file": tokens}
    with Served(tmp_path, listen="0.0.0.0:0", **tls) as served:
        yield f"localhost:{served.events('ready')[0]['listen'].rpartition(':')[2]}"


def test_pages_are_stored_and_loaded_over_tls(
    address: str, certificate: tuple[str, str], seed: int
) -> None:
    pages = np.random.default_rng(seed).integers(0, 256, (10, 65536), dtype=np.uint8)
    out = np.zeros_like(pages)
    with kvw.connect(address, token=TOKEN, tls=certificate[0]) as client:
        ns = client.open(SPACE)
        assert ns.store(range(40), pages).stored == 10
        assert ns.load(range(40), out) == 10
    assert np.array_equal(out, pages)


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_no_proxy_is_asked(
    address: str, certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")  # where nobody listens

    async def asked() -> str:
        async with await kvw.aio.connect(address, token=TOKEN, tls=certificate[0]) as client:
            return str((await client.status())["name"])

    with kvw.connect(address, token=TOKEN, tls=certificate[0]) as client:
        assert client.status()["name"] == asyncio.run(asked())


@pytest.mark.parametrize("token", [None, f"{TOKEN}0"])
def test_missing_or_wrong_token_is_refused_when_connecting(
    address: str, certificate: tuple[str, str], token: str | None
) -> None:
    with pytest.raises(kvw.UsageError) as caught:
        kvw.connect(address, token=token, tls=certificate[0])
    assert caught.value.code == "unauthenticated"


def test_certificate_of_nobody_we_trust_is_refused(address: str) -> None:
    with pytest.raises(kvw.TransportError, match="certificate is not trusted"):
        kvw.connect(address, token=TOKEN, tls=True, timeout_s=T)


def test_plain_connection_to_a_tls_port_is_refused(address: str) -> None:
    with pytest.raises(kvw.TransportError, match="may want TLS"):
        kvw.connect(address, token=TOKEN, timeout_s=T)


def test_tls_to_a_port_without_it_is_refused_by_that_name(
    tmp_path: Path, certificate: tuple[str, str], tokens: str
) -> None:
    with Served(tmp_path, listen="127.0.0.1:0", token_file=tokens) as served:
        port = served.events("ready")[0]["listen"].rpartition(":")[2]
        with pytest.raises(kvw.TransportError, match="does not speak TLS"):
            kvw.connect(f"localhost:{port}", token=TOKEN, tls=certificate[0], timeout_s=T)


def test_clears_and_evictions_say_who_asked(tmp_path: Path, tokens: str) -> None:
    """Incident: whoever had a token could empty a warehouse, and the log did not say from where."""
    with Served(tmp_path, listen="127.0.0.1:0", token_file=tokens) as served:
        port = served.events("ready")[0]["listen"].rpartition(":")[2]
        for client in (
            connect_grpc(f"unix://{served.config.socket}"),
            kvw.connect(f"127.0.0.1:{port}", token=TOKEN, timeout_s=T),
        ):
            with client:
                client.open(SPACE)
                client.evict(SPACE, 1)
                client.clear(SPACE)
        for name in ("evicted", "cleared"):
            here, away = (line["who"] for line in served.events(name))
            assert here == "unix:"
            assert away.startswith("ipv4:127.0.0.1:")


def test_missing_authority_file_is_refused_by_name(address: str) -> None:
    with pytest.raises(kvw.UsageError, match=r"/no/ca\.pem"):
        kvw.connect(address, token=TOKEN, tls="/no/ca.pem")


def test_commands_reach_another_host(
    address: str,
    certificate: tuple[str, str],
    tokens: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--address", address, "--tls", certificate[0], "--token-file", tokens]
    assert main(["status", *flags, "--json"]) == Exit.OK
    assert json.loads(capsys.readouterr().out)["state"] == "serving"
