"""What one host may hold of what all of them share."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from kvwarehouse.daemon.admission import Quota, Quotas, caller_of
from kvwarehouse.errors import CapacityError


@pytest.mark.parametrize(
    ("peer", "caller"),
    [
        ("ipv4:10.1.2.3:5000", "10.1.2.3"),
        ("ipv4:10.1.2.3:6000", "10.1.2.3"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:5000", "2001:db8:1:2::"),
        ("ipv6:[2001:db8:1:2::ffff]:5000", "2001:db8:1:2::"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", "fe80::"),
        ("ipv6:%5B::ffff:10.1.2.3%5D:5000", "10.1.2.3"),
        ("unix:", ""),
        ("unix:/run/kvw.sock.grpc", ""),
        ("", ""),
    ],
)
def test_caller_is_the_host_whatever_its_port_and_its_address_in_its_network(
    peer: str, caller: str
) -> None:
    assert caller_of(peer) == caller


@pytest.mark.parametrize(("bound", "most"), [(1, 1), (2, 1), (7, 4), (8, 4)])
def test_nobody_over_tcp_holds_more_than_half_and_what_ends_is_given_back(
    bound: int, most: int
) -> None:
    quotas, quota = Quotas(), Quota(bound, "calls", "too_many_calls")
    for _ in range(2):
        with ExitStack() as held:
            for _ in range(most):
                held.enter_context(quotas.one("10.0.0.1", quota))
            for caller in ("10.0.0.1", "10.0.0.2")[: 1 if most < bound else 2]:
                with pytest.raises(CapacityError, match=rf"{most} calls") as caught:
                    quotas.take(caller, quota)
                assert (caught.value.code, caught.value.retryable) == ("too_many_calls", True)
            held.enter_context(quotas.one("10.0.0.1", Quota(1, "watchers", "too_many_watchers")))
            for _ in range(bound - most):
                held.enter_context(quotas.one("10.0.0.2", quota))


def test_nobody_gets_more_than_there_is_whoever_holds_it() -> None:
    quotas, quota = Quotas(), Quota(3, "calls", "too_many_calls", "start it with more")
    with ExitStack() as held:
        for caller in ("10.0.0.1", "", ""):
            held.enter_context(quotas.one(caller, quota))
        for caller in ("10.0.0.2", ""):
            with pytest.raises(CapacityError, match=r"bound of this daemon.*start it with more"):
                quotas.take(caller, quota)
    with quotas.one("", quota):
        pass
