"""An answer that is no listing is not believed: a page of HTML, say, that a proxy gives in place of
the store, is an empty listing to the libraries. A host that believed it took nothing for cleared,
and a full store for empty."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

import pytest

from kvwarehouse.errors import TransportError
from kvwarehouse.remote import epochs as epochs_module
from kvwarehouse.remote.epochs import Epochs
from kvwarehouse.remote.listing import Listing
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.object_store import ObjectStore, StoreSettings, open_store
from kvwarehouse.remote.report import ClearTold, EpochsFound, EpochsHeard
from testkit.timed_store import HostClock, KeptPages

BOUND_S = 60.0
NAMES = FleetNames(bytes(range(16)))
SPACE, OTHER = b"s" * 16, b"o" * 16
NODE, DAY = 7, 20785
BODIES = {
    "page": b"<html><body><h1>Down for maintenance</h1></body></html>",
    "error": b'<?xml version="1.0"?>\n<Error><Code>InternalError</Code></Error>',
    "other": b'<?xml version="1.0"?>\n<Login xmlns="urn:x"><Name>b</Name></Login>',
}


class SmallS3:
    """Puts and listings of S3, over HTTP. `in_its_place(prefix, after)`: what is answered, with
    200, to a listing of it behind a name; None: the listing. `page`: how many keys are in a part of
    one."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.in_its_place: Callable[[str, str], bytes | None] = lambda prefix, after: None
        self.page = 1000
        store = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                data = self.rfile.read(int(self.headers.get("content-length") or 0))
                store.objects[urlsplit(self.path).path.removeprefix("/bucket/")] = data
                self.answer(b"", {"ETag": '"e"'})

            def do_GET(self) -> None:
                asked = {key: each[0] for key, each in parse_qs(urlsplit(self.path).query).items()}
                prefix = asked.get("prefix", "")
                after = asked.get("continuation-token", "")
                other = store.in_its_place(prefix, after) if asked else b""
                self.answer(store.listed(asked, prefix, after) if other is None else other, {})

            def answer(self, data: bytes, headers: dict[str, str]) -> None:
                self.send_response(200)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *unused: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def listed(self, asked: dict[str, str], prefix: str, after: str) -> bytes:
        names = sorted(name for name in self.objects if name.startswith(prefix) and name > after)
        if "delimiter" in asked:
            below = {f"{prefix}{n[len(prefix) :].split('/')[0]}/" for n in names}
            each = [f"<CommonPrefixes><Prefix>{part}</Prefix></CommonPrefixes>" for part in below]
            return self._result("".join(each), "")
        some = names[: self.page]
        each = [
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[name])}</Size>"
            "<LastModified>2026-11-28T00:00:00.000Z</LastModified><ETag>e</ETag></Contents>"
            for name in some
        ]
        return self._result("".join(each), some[-1] if len(some) < len(names) else "")

    def _result(self, each: str, follows: str) -> bytes:
        token = f"<NextContinuationToken>{follows}</NextContinuationToken>" if follows else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
            f"<IsTruncated>{'true' if follows else 'false'}</IsTruncated>{token}{each}"
            "</ListBucketResult>"
        ).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def s3() -> Iterator[SmallS3]:
    made = SmallS3()
    yield made
    made.close()


@pytest.fixture
def store(s3: SmallS3, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    settings = StoreSettings("s3://bucket", endpoint=s3.endpoint, region="x")
    return open_store(settings)


class Host:
    def __init__(self, store: ObjectStore) -> None:
        self.store, self.clock = store, HostClock()
        self.said: list[Any] = []
        self.epochs = Epochs(NAMES, NODE, self.said.append, self.clock)

    def goes_on(self, seconds: int) -> int:
        """Rounds that failed."""
        failed = 0
        for _ in range(seconds):
            self.clock.now_s += 1
            try:
                self.epochs.round(self.store, 1_700_000_000_000, put_if_absent=False)
            except TransportError:
                failed += 1
            if self.said and isinstance(self.said[-1], EpochsFound):
                self.epochs.tell(EpochsHeard(self.said[-1].serial))
        return failed


@pytest.mark.parametrize("body", BODIES)
def test_what_others_have_cleared_is_not_known_by_an_answer_that_is_no_listing(
    s3: SmallS3, store: ObjectStore, body: str
) -> None:
    host = Host(store)
    assert host.goes_on(10) == 0
    assert host.epochs.is_fresh
    s3.in_its_place = lambda prefix, after: BODIES[body]
    store.put(NAMES.epoch(SPACE, 9), b"-")  # another host has cleared it
    assert host.goes_on(int(epochs_module.FRESH_S) + 5) > 0
    assert not host.epochs.is_fresh
    s3.in_its_place = lambda prefix, after: None
    assert host.goes_on(5) == 0
    assert host.epochs.is_fresh
    assert host.said[-1].epochs == {SPACE.hex(): 9}


@pytest.mark.parametrize("body", BODIES)
def test_host_that_starts_then_knows_nothing_and_its_clear_stays_owed(
    s3: SmallS3, store: ObjectStore, body: str
) -> None:
    s3.in_its_place = lambda prefix, after: BODIES[body]
    host = Host(store)
    host.epochs.tell(ClearTold(SPACE.hex(), 1))
    assert host.goes_on(10) > 0
    assert (host.said, host.epochs.is_fresh, host.epochs.owed) == ([], False, 1)


def test_listing_that_ends_early_is_none(s3: SmallS3, store: ObjectStore) -> None:
    s3.page = 2
    for number in range(5):
        store.put(NAMES.epoch(SPACE, 9 + number), b"-")
    host = Host(store)
    s3.in_its_place = lambda prefix, after: BODIES["page"] if after else None
    assert host.goes_on(10) > 0
    assert host.said == []
    s3.in_its_place = lambda prefix, after: None
    assert host.goes_on(2) == 0
    assert host.said[-1].epochs == {SPACE.hex(): 13}


def listing_of(store: ObjectStore) -> Any:
    listing = Listing(store, NAMES, KeptPages(today=DAY), HostClock())
    listing.begin()
    assert listing.join(BOUND_S)
    return listing.end()


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("of", ["all", "namespace", "epoch", "day"])
def test_fleet_has_not_put_nothing_where_an_answer_is_no_listing(
    s3: SmallS3, store: ObjectStore, of: str, body: str
) -> None:
    store.put(NAMES.node(NODE), b"-")
    for space in (SPACE, OTHER):
        store.put(NAMES.pages(PagesName(space, 0, DAY, b"k" * 16)), b"12345")
    assert listing_of(store).whole().bytes == 10
    since = {
        "all": NAMES.root,
        "namespace": NAMES.pages_prefix(SPACE),
        "epoch": NAMES.pages_prefix(SPACE, 0),
        "day": NAMES.pages_prefix(SPACE, 0, DAY),
    }[of]
    began = threading.Event()

    def in_its_place(prefix: str, after: str) -> bytes | None:
        if prefix == since:
            began.set()
        return BODIES[body] if began.is_set() else None

    s3.in_its_place = in_its_place
    with pytest.raises(TransportError, match="not believed"):
        listing_of(store)


def test_fleet_that_has_put_nothing_yet_is_believed(store: ObjectStore) -> None:
    store.put(NAMES.node(NODE), b"-")
    assert listing_of(store).whole().bytes == 0
