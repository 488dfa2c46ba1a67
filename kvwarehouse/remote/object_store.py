"""A store of objects over obstore: S3, GCS, Azure, a folder that hosts share, or memory.

Thread-safe. Every call blocks, and obstore lets the GIL go meanwhile. Nothing is tried twice. A
call over a network ends by its deadline. One on a folder ends when the file system answers: it
counts as failed from its deadline on, so that the breaker opens beside it, and whoever owns the
process ends it. An object that is not there is a value; an error is a TransportError
(`remote_failed`, `remote_refused` by the store, `remote_full` where it has no room, `remote_off`
while the breaker is open). A store that refuses or has no room works: that is its answer to one
kind of calls, and whoever makes those keeps to it (store_gate.py). The breaker is for the rest.
Listings have one of their own: a store that does not list may give and take all the same.

Names are those of objects, below the URL's path. No text has a URL's query, nor more than the first
line of what a store said.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from kvwarehouse import trusted_file
from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.remote.breaker import Breaker
from kvwarehouse.remote.library_texts import first_line
from kvwarehouse.remote.report import WorkerSettings
from kvwarehouse.remote.store_gate import CLOSING_CODES
from kvwarehouse.remote_file import RemoteFile
from kvwarehouse.settings import SHARED_SCHEMES

SCHEMES: Final = (*SHARED_SCHEMES, "memory")
NETWORKS: Final = ("s3", "gs", "az")

_DELETES_AT_ONCE: Final = 1000


@dataclass(frozen=True)
class StoreSettings:
    """Where a store is, and how long it is waited for."""

    url: str
    """s3://bucket/prefix, gs://..., az://..., file:///mounted/folder, or memory:///."""
    endpoint: str = ""
    """Of a store that is not the cloud's own, as http://host:port; http:// is without TLS."""
    region: str = ""
    ca: bytes = b""
    """Certificates of an authority of one's own, as PEM."""
    connect_s: float = 0.3
    get_s: float = 1.5
    """Deadline of a get. A load that waits for it has its own."""
    put_s: float = 10.0
    """Deadline of a put, of a delete, and of each part of a listing."""

    @classmethod
    def of(cls, url: str, more: RemoteFile | WorkerSettings) -> StoreSettings:
        """Reads the file of certificates, where there is one. Raises UsageError if it cannot be
        read, or is not to be believed."""
        ca = more.ca_file
        return cls(
            url,
            endpoint=more.endpoint,
            region=more.region,
            ca=trusted_file.read(ca, "ca_file", secret=False) if ca else b"",
            connect_s=more.connect_s,
            get_s=more.get_deadline_s,
            put_s=more.put_deadline_s,
        )


@dataclass(frozen=True)
class StoredObject:
    name: str
    size_bytes: int
    modified_s: float
    """By the store's clock, seconds since 1970."""


@dataclass(frozen=True)
class StoreAbilities:
    """What a store was seen to do."""

    put_if_absent: bool
    """A second put of a name is refused where that is asked for. Some stores take it all the same,
    some refuse the first one too."""
    clock_ahead_s: float
    """How far the store's clock is ahead of this host's, to the second."""


class ObjectStore:
    """`reads`, `writes`: obstore's stores of one place, with the deadlines `get_s` and `put_s`;
    `clock`: monotonic seconds; `check`: raises where the place is no longer what was opened;
    `copy`: of one name to another, where obstore's will not do. See open_store()."""

    def __init__(
        self,
        reads: Any,
        writes: Any,
        settings: StoreSettings,
        clock: Callable[[], float] = time.monotonic,
        check: Callable[[], None] = lambda: None,
        copy: Callable[[str, str], None] | None = None,
    ) -> None:
        import obstore

        self._check = check
        self._obstore = obstore
        exceptions = obstore.exceptions
        self._taken = (exceptions.AlreadyExistsError, exceptions.PreconditionError)
        self._answers = (FileNotFoundError, *self._taken)  # of a store that works
        self._reads, self._writes = reads, writes
        self._copy = copy or (lambda source, to: self._obstore.copy(self._writes, source, to))
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        # Calls: from when on each counts as failed, and whose breaker hears it.
        self._under_way: dict[int, tuple[float, Breaker]] = {}
        self._began: dict[int, float] = {}  # calls, late ones too
        self._next_call = 0
        self.breaker, self.list_breaker = Breaker(clock), Breaker(clock)
        # That they have counted, whatever came of other calls since. Never raised: what is raised
        # holds its frames, and with them what was put.
        self._last_failures: dict[Breaker, TransportError] = {}

    @property
    def last_failure(self) -> TransportError | None:
        """Of all calls but listings; see failing()."""
        return self._last_failures.get(self.breaker)

    def get(
        self, name: str, begin: int, end: int, first_byte: Callable[[], None] = lambda: None
    ) -> memoryview | None:
        """Bytes `begin` to `end` of an object: fewer where it is shorter. None: there is none.
        `first_byte`: called when they begin to come."""
        try:
            with self._call("get", self._settings.get_s):
                wanted = {"range": (begin, end)}
                coming = self._obstore.get(self._reads, name, options=wanted)
                first_byte()
                return memoryview(coming.bytes())
        except FileNotFoundError:
            return None
        except _ShorterError:
            return memoryview(b"")

    def put(self, name: str, data: Any, *, if_absent: bool = False) -> bool:
        """Stores bytes or another buffer, whole or not at all. False: there is such an object, and
        `if_absent` was heeded."""
        mode = "create" if if_absent else "overwrite"
        try:
            with self._call("put", self._settings.put_s, answers=self._taken):
                self._obstore.put(self._writes, name, data, mode=mode, use_multipart=False)
        except self._taken:
            return False
        return True

    def copy(self, source: str, to: str) -> bool:
        """The store copies an object to another name by itself, as of now. False: there is none."""
        try:
            with self._call("copy", self._settings.put_s):
                self._copy(source, to)
        except FileNotFoundError:
            return False
        return True

    def delete(self, names: Sequence[str]) -> None:
        """Also of objects that are not there."""
        for at in range(0, len(names), _DELETES_AT_ONCE):
            some = list(names[at : at + _DELETES_AT_ONCE])
            try:
                with self._call("delete", self._settings.put_s):
                    self._obstore.delete(self._writes, some)
            except FileNotFoundError:  # a folder ends at the first that is not there
                for name in some if len(some) > 1 else ():
                    self.delete([name])

    def list(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        """All objects below `prefix`, which ends at a slash, with names behind `after`. In the
        order of names, but for folders. Each part is a call with a deadline of its own."""
        parts = self._obstore.list(self._writes, prefix.rstrip("/"), offset=after or None)
        while True:
            with self._call("list", self._settings.put_s, breaker=self.list_breaker):
                part = next(parts, None)
            if part is None:
                return
            for found in part:
                modified_s = found["last_modified"].timestamp()
                yield StoredObject(found["path"], found["size"], modified_s)

    @property
    def lists_in_order(self) -> bool:
        """A listing that failed goes on behind the last name that it had."""
        return urlsplit(self._settings.url).scheme != "file"

    def parts(self, prefix: str) -> Sequence[str]:
        """The prefixes directly below `prefix`, sorted. All end at a slash. Objects that lie there
        are left out."""
        with self._call("list", self._settings.put_s, breaker=self.list_breaker):
            found = self._obstore.list_with_delimiter(self._writes, prefix.rstrip("/"))
        return sorted(f"{part.rstrip('/')}/" for part in found["common_prefixes"])

    def probe(self, prefix: str) -> StoreAbilities:
        """Puts an object twice below `prefix`, and takes it away again."""
        name = f"{prefix.rstrip('/')}/{secrets.token_hex(8)}"
        try:
            first, second = (self.put(name, data, if_absent=True) for data in (b"1", b"2"))
            heeded = first and not second
        except (
            TransportError
        ):  # Swift answers 501; whether it takes a put at all, the next one says
            heeded = False
        self.put(name, b"3")
        before_s = time.time()
        with self._call("head", self._settings.put_s, answers=()):
            modified_s = self._obstore.head(self._writes, name)["last_modified"].timestamp()
        self.delete([name])
        return StoreAbilities(heeded, modified_s - before_s)

    def longest_call_s(self) -> float:
        """How long the oldest call has been under way; 0 without one."""
        with self._lock:
            return self._clock() - min(self._began.values()) if self._began else 0.0

    def failing(self) -> bool:
        """True while the breaker is open, which listings do not heed. Calls that are late count as
        failed from here on."""
        self._count_late()
        return self.breaker.is_open

    @contextlib.contextmanager
    def _call(
        self,
        what: str,
        deadline_s: float,
        answers: tuple[type[Exception], ...] | None = None,
        breaker: Breaker | None = None,
    ) -> Iterator[None]:
        """A call to the store; its breaker hears how it ended, once. `answers`: what a store that
        works may raise, besides that it refuses or has no room."""
        self._count_late()
        breaker = breaker or self.breaker
        if not breaker.admit():
            failure = self._last_failures.get(breaker)
            told = failure.message if failure else f"{what}: {self._place}"
            raise TransportError(f"{told}; it has failed too often to be asked", code="remote_off")
        number = self._begin(deadline_s, breaker)
        failed = True
        try:
            self._check()
            yield
            failed = False
        except Exception as error:
            # Whatever a store or its library says beyond its answers: it did not do it.
            known = self._answers if answers is None else answers
            expected = isinstance(error, known) or _is_shorter(error)
            if not expected or _says(error, _NO_BUCKET):
                failure = self._failure(what, error)
                failed = failure.code not in CLOSING_CODES
                if failed:
                    self._last_failures[breaker] = self._failure(what, error)
                raise failure from error
            failed = False
            if _is_shorter(error):
                raise _ShorterError from error
            raise
        finally:
            self._end(number, failed=failed)

    def _begin(self, deadline_s: float, breaker: Breaker) -> int:
        with self._lock:
            self._next_call += 1
            now = self._began[self._next_call] = self._clock()
            self._under_way[self._next_call] = now + deadline_s, breaker
            return self._next_call

    def _end(self, number: int, *, failed: bool) -> None:
        with self._lock:
            del self._began[number]
            _, breaker = self._under_way.pop(number, (0.0, None))
        if breaker is None:
            return  # it was late, and counted
        if failed:
            breaker.failed()
        else:
            breaker.succeeded()

    def _count_late(self) -> None:
        now = self._clock()
        with self._lock:
            late = [number for number, (due, _) in self._under_way.items() if due < now]
            breakers = [self._under_way.pop(number)[1] for number in late]
        for breaker in breakers:
            self._last_failures[breaker] = TransportError(
                f"{self._place} has not answered within the deadline of the call",
                code="remote_failed",
            )
            breaker.failed()

    @property
    def _place(self) -> str:
        parts = urlsplit(self._settings.url)
        return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"

    def _failure(self, what: str, error: Exception) -> TransportError:
        exceptions = self._obstore.exceptions
        refused = isinstance(
            error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
        ) or _says(error, (*_REFUSED, *_NO_BUCKET))
        code = "remote_refused" if refused else "remote_failed"
        return TransportError(
            f"{what}: {self._place}: {first_line(error)}",
            code="remote_full" if _says(error, _FULL) else code,
            retryable=not refused,
            context={"call": what},
        )


def open_store(settings: StoreSettings) -> ObjectStore:
    """Asks nobody yet. Credentials are those of the environment, as the SDKs have them. Raises
    UsageError for a URL or a setting that cannot be, and where obstore is not installed."""
    scheme = urlsplit(settings.url).scheme
    if scheme not in SCHEMES:
        raise UsageError(
            f"{settings.url.split('?')[0]} is no store that is known here; use one of "
            + ", ".join(f"{known}://" for known in SCHEMES),
            code="remote_url",
        )
    require_obstore()
    from obstore.exceptions import BaseError
    from obstore.store import MemoryStore, from_url

    if scheme == "memory":
        store = MemoryStore()
        return ObjectStore(store, store, settings)
    try:
        if scheme == "file":
            # Folders of days that are gone would stay, 256 for each, and be listed for ever.
            folder = _Folder(unquote(urlsplit(settings.url).path))
            store = from_url(settings.url, automatic_cleanup=True)
            return ObjectStore(store, store, settings, check=folder.check, copy=folder.copy)
        reads = from_url(settings.url, **_options(settings, scheme, settings.get_s))
        writes = from_url(settings.url, **_options(settings, scheme, settings.put_s))
    except BaseError as error:
        raise UsageError(
            f"{settings.url.split('?')[0]}: {first_line(error)}", code="remote_url"
        ) from error
    return ObjectStore(reads, writes, settings)


def require_obstore() -> None:
    """Raises UsageError where it is not installed."""
    if importlib.util.find_spec("obstore") is None:
        raise UsageError(
            "obstore is not installed, which reaches the stores; run: pip install "
            "'kvwarehouse[remote]'",
            code="remote_extra",
        )


class _Folder:
    """One that hosts share, at a path. What is there when its mount is gone is another, an empty
    one of this host's disk: obstore would make folders in it, and fill it."""

    def __init__(self, path: str) -> None:
        if not os.path.isdir(path):
            raise UsageError(
                f"{path} is no folder here; mount what the hosts share, or make it",
                code="remote_url",
            )
        self._path = path
        self._inode = os.stat(path).st_ino  # the same after it was mounted again

    def check(self) -> None:
        try:
            same = os.stat(self._path).st_ino == self._inode
        except FileNotFoundError:
            same = False
        if not same:
            raise OSError(f"{self._path} is not the folder that was opened; mount it again")

    def copy(self, source: str, to: str) -> None:
        """Links a file to another name, and gives it the time of now, since rules go by that:
        obstore's copy is a link as old as the first. They are one file, so the first is as new,
        and stays longer where no daemon is that would delete it; a file of its own would cost its
        bytes every day. Raises FileNotFoundError where there is none."""
        first, path = os.path.join(self._path, source), os.path.join(self._path, to)
        os.stat(first)  # before a folder is made for it
        staged = f"{path}#{secrets.randbelow(10**9)}"  # in no listing: as obstore's own ones
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.link(first, staged)
        try:
            os.utime(staged)
            os.replace(staged, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(staged)  # it stays where `to` was the same file already


def _options(settings: StoreSettings, scheme: str, deadline_s: float) -> dict[str, Any]:
    client: dict[str, Any] = {
        "timeout": f"{round(deadline_s * 1000)}ms",
        "connect_timeout": f"{round(settings.connect_s * 1000)}ms",
        # A call on a connection that the store has closed meanwhile fails, and nothing is tried
        # twice: stores close idle ones after 20 s and more.
        "pool_idle_timeout": "10s",
    }
    if settings.endpoint.startswith("http://"):
        client["allow_http"] = True
    if settings.ca:
        client["root_certificate"] = settings.ca
    config: dict[str, Any] = {}
    if settings.endpoint:
        config["endpoint"] = settings.endpoint
    if settings.region and scheme == "s3":
        config["region"] = settings.region
    return {
        "config": config or None,
        "client_options": client,
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=deadline_s)},
    }


class _ShorterError(Exception):
    """The object ends before the range begins: the store works, and the object is not ours."""


def _is_shorter(error: Exception) -> bool:
    """obstore has no exception of its own for it: HTTP's status, or a folder's word."""
    text = str(error)
    return "416 Range Not Satisfiable" in text or "StartTooLarge" in text


_FULL: Final = (
    "507 Insufficient Storage",
    "<Code>QuotaExceeded</Code>",  # of Ceph, whose status is 403
    f"(os error {errno.ENOSPC})",
    f"(os error {errno.EDQUOT})",
)


# Of a listing, and of who hands out credentials.
_REFUSED: Final = ("401 Unauthorized", "403 Forbidden")

# Where that is not there, no object is, and none can be put: the status is an object's, 404. Of S3
# and of Google's store; of Azure.
_NO_BUCKET: Final = ("<Code>NoSuchBucket</Code>", "<Code>ContainerNotFound</Code>")


def _says(error: Exception, signs: tuple[str, ...]) -> bool:
    """obstore has no exceptions of its own for these."""
    text = str(error)
    return any(sign in text for sign in signs)
