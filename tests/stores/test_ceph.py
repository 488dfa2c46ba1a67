"""The remote tier over a real object store, with TLS: what it does, and what a host's engine sees
while the store refuses, is full, stands still, is gone, or has other bytes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse_bench.harness.eventually import eventually
from testkit.ceph import Bucket, CephCluster
from testkit.remote_host import RUN_PAGES, SPACE, RemoteHost

Hosts = Callable[..., RemoteHost]


def asked(bucket: Bucket, *arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    """Exit status of `kvwarehouse remote`, and what it said."""
    status = main(["remote", *arguments, *bucket.flags, "--json"])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else said.err


def test_store_does_all_that_is_needed(bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = asked(bucket, "init", capsys=capsys)
    assert (status, said["works"]) == (Exit.OK, True), said
    assert set(said["calls"].values()) == {"ok"}
    assert said["put_if_absent"] is True
    assert list(bucket.store.list("")) == []


def wrong_secret(bucket: Bucket, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("AWS_SECRET_ACCESS_KEY", "another")


def other_authority(bucket: Bucket, patch: pytest.MonkeyPatch) -> None:
    bucket.write_config(ca_file='""')


def no_bucket(bucket: Bucket, patch: pytest.MonkeyPatch) -> None:
    bucket.url = "s3://there-is-none/prod"


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (wrong_secret, "SignatureDoesNotMatch"),
        (other_authority, "its certificate is not believed: UnknownIssuer"),
        (no_bucket, "NoSuchBucket"),
    ],
)
def test_mistake_is_said_before_a_daemon_is_started(
    mistake: Callable[[Bucket, pytest.MonkeyPatch], None],
    says: str,
    bucket: Bucket,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mistake(bucket, monkeypatch)
    status, said = asked(bucket, "init", capsys=capsys)
    assert (status, said["works"]) == (Exit.FOUND, False)
    assert says in said["calls"]["put"]
    for action in ("check", "gc"):
        status, said = asked(bucket, action, capsys=capsys)
        assert status != Exit.OK
        assert says in str(said)


def test_listing_has_more_objects_than_one_answer(bucket: Bucket) -> None:
    store = bucket.store
    names = [f"v1/{number % 7}/{number:04}" for number in range(1200)]
    for name in names:
        assert store.put(name, b"x", if_absent=True)
    assert not store.put(names[0], b"y", if_absent=True)
    assert [each.name for each in store.list("v1/")] == sorted(names)
    assert [each.name for each in store.list("v1/3/", after="v1/3/0600")] == [
        name for name in sorted(names) if name > "v1/3/0600" and name.startswith("v1/3/")
    ]
    assert store.parts("v1/") == [f"v1/{number}/" for number in range(7)]
    store.delete([*names, "v1/never/there"])
    assert list(store.list("v1/")) == []


def test_hosts_share_what_one_of_them_has_put(
    host: Hosts, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    one = host()
    one.put(1, 2, runs=3)
    assert len(bucket.objects()) == 6
    other = host()
    for prompt in (1, 2):
        other.until_remote(prompt, 3)
        assert other.load(prompt, 3) == 3 * RUN_PAGES
    status, said = asked(bucket, "check", capsys=capsys)
    assert (status, said["verified"]["objects"], said["damaged"]) == (Exit.OK, 6, []), said
    assert other.client.clear(SPACE).remote == "done"
    eventually(lambda: one.found(1) == {}, "the first host has heard of the clear")
    assert one.load(1) == 0
    status, said = asked(bucket, "gc", capsys=capsys)
    assert status == Exit.OK


def test_other_bytes_in_the_store_are_a_miss(host: Hosts, bucket: Bucket) -> None:
    one = host()
    one.put(1)
    ((name,), store) = bucket.objects(), bucket.store
    data = bytearray(store.get(name, 0, 1 << 30) or b"")
    data[len(data) - 100] ^= 1
    store.put(name, bytes(data))
    one.empty()
    one.until_remote(1)
    loaded = one.load(1)
    assert (int(loaded), loaded.missed) == (RUN_PAGES - 1, {"remote_damaged": 1})


def test_full_bucket_stops_puts_and_not_gets(
    ceph: CephCluster, host: Hosts, bucket: Bucket
) -> None:
    one = host()
    one.put(1)
    ceph.set_quota(bucket.name, 4096)
    one.store(2)
    status = one.until(lambda status: status["state"] == "full", "the bucket is full")
    assert "QuotaExceeded" in status["reason"]
    one.empty()
    one.until_remote(1)
    assert one.load(1) == RUN_PAGES


def test_suspended_user_costs_misses_and_is_told(
    ceph: CephCluster, host: Hosts, bucket: Bucket
) -> None:
    one = host()
    one.put(1)
    one.empty()
    one.until_remote(1)
    ceph.suspend_user()
    try:
        loaded = one.load(1)
        assert int(loaded) == 0
        one.until_state("refused")
        one.store(2)
        assert one.load(2) == RUN_PAGES
        eventually(lambda: one.serving.events("remote_refused"), "the state has lasted")
    finally:
        ceph.enable_user()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_gateway_that_is_gone_keeps_no_load_beyond_its_time(
    number: signal.Signals, ceph: CephCluster, host: Hosts
) -> None:
    one = host()
    one.put(1)
    one.empty()
    one.until_remote(1)
    ceph.signal_gateway(number)
    try:
        loaded = one.load(1, timeout_s=0.5)
        assert (int(loaded), sum(loaded.missed.values())) == (0, RUN_PAGES)
        one.store(2)
        assert one.load(2) == RUN_PAGES
        eventually(lambda: one.found(1) == {}, "nothing is promised any more")
    finally:
        if number == signal.SIGSTOP:
            ceph.signal_gateway(signal.SIGCONT)
        else:
            ceph.start_gateway()
    one.until_remote(1)
    assert one.load(1) == RUN_PAGES
