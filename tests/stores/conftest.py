"""Hosts of one fleet over a real object store: a Ceph cluster of this machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.ceph import Bucket, CephCluster, missing_programs
from testkit.remote_host import RemoteHost


@pytest.fixture(scope="session")
def ceph() -> Iterator[CephCluster]:
    if missing := missing_programs():
        pytest.skip(f"no {', '.join(missing)} on this machine; `make test-stores` installs them")
    folder = Path(tempfile.mkdtemp(prefix="kvw-ceph-"))
    cluster = CephCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)


@pytest.fixture
def bucket(
    ceph: CephCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> Bucket:
    for name, value in ceph.credentials.items():
        monkeypatch.setenv(name, value)
    number = request.session.stash.get(_BUCKETS, 0)
    request.session.stash[_BUCKETS] = number + 1
    return Bucket(ceph, f"kv-{number}", tmp_path)


_BUCKETS = pytest.StashKey[int]()


@pytest.fixture
def host(bucket: Bucket, tmp_path: Path) -> Iterator[Callable[..., RemoteHost]]:
    """Each has a socket and an arena of its own."""
    made: list[RemoteHost] = []

    def serve(**settings: Any) -> RemoteHost:
        usual = {
            "remote": bucket.url,
            "remote_config": str(bucket.config),
            "remote_write": "all",
        }
        one = RemoteHost(tmp_path, **{**usual, **settings})
        made.append(one)
        one.start()
        return one

    yield serve
    for one in made:
        one.remove()
