"""Files and messages of a newer kvwarehouse: refused with what is newer and what to do about it,
before anything is changed on disk, so that the newer one still finds all of it.

Slots and segments, whose checksums only the core can make, are in native/tests/
fault_versions_test.cc.
"""

from __future__ import annotations

import hashlib
import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import lmdb
import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse import wire
from kvwarehouse.daemon.identity import FILE_NAMES
from kvwarehouse.wire import warehouse_pb2 as pb
from kvwarehouse_bench.harness.client_process import ClientProcess
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import RefusedError, Serving
from testkit import tally

pytestmark = pytest.mark.timeout(120)

PAGE_BYTES = 5000
NODES = list(range(6))
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=PAGE_BYTES
)
CLASS = "file or message of a newer version"
LOCKS = ("lock", "daemon.lock")  # say the pid of who tried


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    disk = tmp_path_factory.mktemp("newer")
    with Serving(disk, dram="8MiB", nvme_capacity="8MiB", nvme_segment="1MiB") as serving:
        with serving.connect() as client:
            ns = client.open(SPACE)
            result = ns.store(NODES, pages_of(NODES, 0, 0, PAGE_BYTES), timeout_s=60)
            assert result.stored == len(NODES)
            assert client.flush().pending == 0
            other = kvw.Namespace(**{**SPACE.to_fields(), "model": "cleared"})
            client.open(other)
            client.clear(other)
        yield serving


def check_served(serving: Serving) -> None:
    with serving.connect(timeout_s=60) as client:
        out = np.zeros((len(NODES), PAGE_BYTES), np.uint8)
        assert client.open(SPACE).load(NODES, out, timeout_s=60) == len(NODES)
        check_pages(out, NODES, 0, 0)
        assert client.status()["core"]["tiers"]["nvme"]["pages"] == len(NODES)


def contents(serving: Serving) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in (serving.arena_dir, serving.nvme_dir)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in LOCKS
    }


def whole_again(path: Path, version: int) -> None:
    """One of the small files with its BLAKE2b at the end."""
    data = path.read_bytes()
    body = data[:8] + struct.pack("<I", version) + data[12:-32]
    path.write_bytes(body + hashlib.blake2b(body, digest_size=32).digest())


def identity(serving: Serving, version: int) -> Path:
    for folder in (serving.arena_dir, serving.nvme_dir):
        for name in FILE_NAMES:
            whole_again(folder / name, version)
    return serving.nvme_dir / "identity"


def epoch(serving: Serving, version: int) -> Path:
    whole_again(serving.nvme_dir / "epoch", version)
    return serving.nvme_dir / "epoch"


def ledger(serving: Serving, version: int) -> Path:
    path = serving.nvme_dir / "ledger.mdb"
    key, value = b"f/version", struct.pack("<Q", version)
    check = hashlib.blake2b(key, digest_size=8)
    check.update(value)
    with (
        lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 28) as environment,
        environment.begin(write=True) as transaction,
    ):
        transaction.put(key, check.digest() + value)
    return path


def control(serving: Serving, version: int) -> Path:
    path = serving.arena_dir / "control"
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", version))
    return path


@pytest.mark.parametrize("harm", [identity, epoch, ledger, control])
def test_file_of_a_newer_version_is_refused_and_nothing_is_changed(
    serving: Serving, rng: random.Random, harm: Callable[[Serving, int], Path]
) -> None:
    for round_ in range(min(4, tally.rounds(1))):
        serving.kill()
        version = 2 if round_ == 0 else rng.randrange(2, 1 << 31)
        path = harm(serving, version)
        before = contents(serving)
        with pytest.raises(RefusedError) as refused:
            serving.start()
        assert (
            str(path) in refused.value.text
            or str(path).replace(str(serving.nvme_dir), str(serving.arena_dir))
            in refused.value.text
        )
        assert f"version {version}" in refused.value.text
        assert "newer" in refused.value.text
        assert contents(serving) == before
        harm(serving, 1)
        serving.start()
        check_served(serving)
        tally.count(CLASS)


def test_session_of_a_newer_client_that_lives_is_refused_and_of_a_dead_one_is_not(
    serving: Serving,
) -> None:
    """What it pins cannot be read, so that its pages would be reused under it."""
    sessions = serving.arena_dir / "sessions"
    before = set(sessions.iterdir())
    with ClientProcess(serving.address, "say(1); hear()") as client:
        client.hear()
        [path] = set(sessions.iterdir()) - before
        serving.kill()
        with path.open("r+b") as file:
            file.seek(8)
            file.write(struct.pack("<I", 1000))
        held = contents(serving)
        with pytest.raises(RefusedError) as refused:
            serving.start()
        assert str(path) in refused.value.text
        assert "end the newer client" in refused.value.text
        assert contents(serving) == held
    serving.start()
    check_served(serving)
    tally.count(CLASS, 2)


def test_index_of_any_version_is_made_anew(serving: Serving) -> None:
    serving.kill()
    [path] = serving.arena_dir.glob("index.*")
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 2))
    serving.start()
    check_served(serving)
    assert not path.exists()
    tally.count(CLASS)


def test_client_of_a_newer_local_protocol_is_told_which_to_upgrade(serving: Serving) -> None:
    head = np.zeros(1, "u4,u2,u2,u8,u4,u4,u4,u4")
    for version in (0, 2, 65535):
        head[0] = (0x3157564B, version, 1, 7, 48, 0, 0, 0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as newer:
            newer.settimeout(60)
            newer.connect(serving.socket)
            newer.send(head.tobytes() + bytes(16))
            answer = newer.recv(1 << 17)
        assert b"protocol_version" in answer
        assert f"speaks protocol {version}".encode() in answer
        assert b"upgrade the older one" in answer
        tally.count(CLASS)
    check_served(serving)


def test_namespace_with_fields_of_a_newer_client_is_refused(serving: Serving) -> None:
    request = pb.OpenNamespaceRequest(namespace=wire.namespace_to_wire(SPACE), id=SPACE.id)
    newer = pb.OpenNamespaceRequest.FromString(request.SerializeToString())
    newer.namespace.MergeFromString(b"\xf8\x7f\x01")  # field 2047, a number
    with pytest.raises(grpc.RpcError) as refused:
        call(serving, newer)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "upgrade the daemon" in refused.value.details()
    other = pb.OpenNamespaceRequest(namespace=wire.namespace_to_wire(SPACE), id=b"x" * 16)
    with pytest.raises(grpc.RpcError) as refused:
        call(serving, other)
    assert "use the same kvwarehouse on both sides" in refused.value.details()
    tally.count(CLASS, 2)
    # What a newer client adds elsewhere, and this daemon can do without, is no obstacle.
    request.MergeFromString(b"\xf8\x7f\x01")
    assert call(serving, request).namespace.id == SPACE.id
    check_served(serving)


def call(serving: Serving, request: pb.OpenNamespaceRequest) -> pb.OpenNamespaceResponse:
    with grpc.insecure_channel(f"unix:{serving.socket}.grpc") as channel:
        stub = wire.WarehouseStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        answer: pb.OpenNamespaceResponse = stub.OpenNamespace(request, timeout=60)
        return answer
