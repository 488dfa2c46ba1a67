"""What the doctor finds of real daemons: serving, stopped, killed, and of things that are none."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvwarehouse_connectors.doctor.look as look
from kvwarehouse.testing.serving import Serving
from kvwarehouse.testing.until import until
from kvwarehouse_connectors.doctor.facts import Facts
from kvwarehouse_connectors.doctor.findings import Finding, Verdict
from kvwarehouse_connectors.doctor.look import daemon_facts, host_facts
from kvwarehouse_connectors.doctor.packages import software_facts
from kvwarehouse_connectors.doctor.warehouse import check_warehouse


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="16MiB", nvme_capacity="64MiB") as serving:
        yield serving


def judged(address: str) -> dict[str, Finding]:
    facts = Facts(
        software=software_facts("numpy", "kvwarehouse.commands"),
        host=host_facts(),
        daemon=daemon_facts(address),
    )
    return {finding.check: finding for finding in check_warehouse(facts)}


def test_serving_daemon_is_found_with_its_tiers(serving: Serving) -> None:
    found = judged(serving.address)
    assert {check: str(finding.verdict) for check, finding in found.items()} == {
        "address": "ok",
        "socket": "ok",
        "daemon": "ok",
        "versions": "ok",
        "DRAM tier": "warn",  # 16 MiB
        "NVMe tier": "ok",
    }
    assert "16 MiB" in found["DRAM tier"].what
    assert "64 MiB" in found["NVMe tier"].what


def test_doctor_leaves_no_session_behind(serving: Serving) -> None:
    with serving.connect() as client:

        def connections() -> int:
            return int(client.status()["core"]["connections"])

        before = connections()
        judged(serving.address)
        until(lambda: connections() == before, "its connection is gone")


def test_killed_daemon_is_told_from_none(serving: Serving) -> None:
    serving.kill()
    found = judged(serving.address)
    bad = "daemon" if Path(serving.socket).exists() else "socket"
    assert found[bad].verdict is Verdict.FAIL
    assert "kvwarehouse serve" in found[bad].fix
    assert found["DRAM tier"].verdict is Verdict.SKIP


def test_stopped_daemon_does_not_hold_the_doctor(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "_CALL_TIMEOUT_S", 0.2)
    serving.pause()
    try:
        found = judged(serving.address)
    finally:
        serving.resume()
    assert found["socket"].verdict is Verdict.OK
    assert found["daemon"].verdict is Verdict.FAIL
    assert judged(serving.address)["daemon"].verdict is Verdict.OK


@pytest.mark.parametrize("what", ["nothing", "file", "folder", "dead socket"])
def test_what_is_no_daemon_is_named(what: str, tmp_path: Path) -> None:
    path = tmp_path / "kvw.sock"
    if what == "file":
        path.write_text("")
    elif what == "folder":
        path.mkdir()
    elif what == "dead socket":
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bound:
            bound.bind(str(path))
        (tmp_path / "kvw.sock.grpc").write_text("")
    found = judged(f"unix://{path}")
    check = "daemon" if what == "dead socket" else "socket"
    assert found[check].verdict is Verdict.FAIL
    assert str(path) in f"{found[check].what} {found[check].fix}"


def test_address_without_a_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "_CALL_TIMEOUT_S", 0.2)
    assert judged("127.0.0.1:1")["address"].verdict is Verdict.FAIL
    assert judged("no address at all")["address"].verdict is Verdict.FAIL


def test_facts_of_this_host_are_plausible() -> None:
    facts = host_facts()
    assert facts.shm_bytes >= facts.shm_free_bytes >= 0
    assert facts.memlock_bytes >= -1
