"""What the doctor finds of real daemons: serving, stopped, killed, and of things that are none."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvwarehouse as kvw
import kvwarehouse_connectors.doctor.look as look
from kvwarehouse.host import Finding, Verdict
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.doctor.engines import ENGINES, engine_of
from kvwarehouse_connectors.doctor.facts import Facts, PageFacts
from kvwarehouse_connectors.doctor.look import daemon_facts, host_facts
from kvwarehouse_connectors.doctor.packages import software_facts
from kvwarehouse_connectors.doctor.warehouse import check_warehouse


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="16MiB", nvme_capacity="64MiB") as serving:
        yield serving


def space(page_bytes: int, shards: int) -> kvw.Namespace:
    return kvw.Namespace(
        model="m",
        weights="w",
        dtype="b",
        layout="l/1",
        page_tokens=1,
        page_bytes=page_bytes,
        shards=shards,
    )


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
        "index": "ok",
    }
    assert "16 MiB" in found["DRAM tier"].what
    assert "64 MiB" in found["NVMe tier"].what


@pytest.mark.parametrize(
    ("dram", "nvme", "most"),
    [
        ("16MiB", "64MiB", 2 << 20),  # an eighth of the arena
        ("64MiB", "16MiB", (2 << 20) - (64 << 10)),  # of the disk, less a segment's own
    ],
)
def test_largest_page_of_the_status_is_the_largest_that_the_daemon_takes(
    dram: str, nvme: str, most: int, tmp_path: Path
) -> None:
    with Serving(tmp_path, dram=dram, nvme_capacity=nvme) as serving, serving.connect() as client:
        assert client.status()["core"]["page_bytes_max"] == most
        for page_bytes, shards in ((most, 1), (most // 2, 2)):
            client.open(space(page_bytes, shards))
            with pytest.raises(kvw.UsageError) as refused:
                client.open(space(page_bytes + 1, shards))
            assert refused.value.code == "page_too_large"


@pytest.mark.parametrize("name", ENGINES)
def test_page_that_the_daemon_would_refuse_is_found_before_it_is_asked(
    name: str, serving: Serving
) -> None:
    daemon = daemon_facts(serving.address)
    for page_bytes, verdict in ((2 << 20, Verdict.OK), ((2 << 20) + 4096, Verdict.FAIL)):
        page = PageFacts(model="m", tokens=16, page_bytes=page_bytes)
        found = engine_of(name).findings_of(Facts(daemon=daemon, page=page))
        (pages,) = [one for one in found if one.check == "pages"]
        assert pages.verdict is verdict


def test_doctor_leaves_no_session_behind(serving: Serving) -> None:
    with serving.connect() as client:

        def connections() -> int:
            return int(client.status()["core"]["connections"])

        before = connections()
        judged(serving.address)
        eventually(lambda: connections() == before, "its connection is gone")


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
    with monkeypatch.context() as patch:
        patch.setattr(look, "_CALL_TIMEOUT_S", 0.2)
        serving.pause()
        try:
            found = judged(serving.address)
        finally:
            serving.resume()
    monkeypatch.setattr(look, "_CALL_TIMEOUT_S", DEADLINE_S)  # one that goes on has the time to
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
