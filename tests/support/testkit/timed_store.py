"""A store of the remote tier whose clock the test has, and which fails when it is told to:
obstore's memory or a folder beneath it, with the times of the test. Thread-safe."""

from __future__ import annotations

import builtins
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from kvwarehouse.errors import TransportError
from kvwarehouse.remote.names import PagesName
from kvwarehouse.remote.object_store import (
    ObjectStore,
    StoreAbilities,
    StoredObject,
    StoreSettings,
    open_store,
)

_Done = TypeVar("_Done")


class HostClock:
    """Monotonic seconds of one host, or of the store."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds


class TimedStore(ObjectStore):
    """`clock`: the store's, seconds since 1970. `scale`: objects are said to have so many times
    their bytes. `fails(call number) -> bool`: that call fails; where `after`, it does its work
    first, as a put whose answer is lost."""

    def __init__(
        self, clock: Callable[[], float], url: str = "memory:///", *, scale: int = 1
    ) -> None:
        self._inner = open_store(StoreSettings(url))
        self.clock, self.scale = clock, scale
        self.fails: Callable[[int], bool] = lambda number: False
        self.after = False
        self.heeds_if_absent = True
        self.calls = 0
        self._times: dict[str, float] = {}
        self._mutex = threading.Lock()

    def get(
        self, name: str, begin: int, end: int, first_byte: Callable[[], None] = lambda: None
    ) -> memoryview | None:
        return self._called(lambda: self._inner.get(name, begin, end, first_byte))

    def put(self, name: str, data: Any, *, if_absent: bool = False) -> bool:
        def do() -> bool:
            done = self._inner.put(name, data, if_absent=if_absent and self.heeds_if_absent)
            if done:
                self._times[name] = self.clock()
            return done

        return self._called(do)

    def delete(self, names: Sequence[str]) -> None:
        self._called(lambda: self._inner.delete(names))

    def list(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        found = self._called(lambda: list(self._inner.list(prefix, after)))
        for item in found:
            modified_s = self._times.get(item.name, item.modified_s)
            yield StoredObject(item.name, item.size_bytes * self.scale, float(int(modified_s)))

    @property
    def lists_in_order(self) -> bool:
        return self._inner.lists_in_order

    def parts(self, prefix: str) -> Sequence[str]:
        return self._called(lambda: self._inner.parts(prefix))

    def probe(self, prefix: str) -> StoreAbilities:
        self._called(lambda: None)
        return StoreAbilities(self.heeds_if_absent, 0.0)

    def failing(self) -> bool:
        return False

    def names(self) -> builtins.list[str]:
        """All objects, whatever fails."""
        return sorted(item.name for item in self._inner.list(""))

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Of all objects, whatever fails."""
        return ((item.name, item.size_bytes * self.scale) for item in self._inner.list(""))

    def read(self, name: str) -> bytes:
        data = self._inner.get(name, 0, 1 << 30)
        assert data is not None
        return bytes(data)

    def _called(self, do: Callable[[], _Done]) -> _Done:
        with self._mutex:
            self.calls += 1
            fails = self.fails(self.calls)
        if not fails:
            return do()
        if self.after:
            do()
        raise TransportError("the test wants it to fail", code="remote_failed")


class KeptPages:
    """A presence filter that is exact: what the worker's has, without its loss, and as strict about
    days. `window`: how many it has, the newest among them."""

    def __init__(self, window: int = 8, today: int = 0) -> None:
        self.days: dict[tuple[bytes, int], int] = {}
        self.window, self.newest, self.today = window, today, today
        self.puts = 0
        self._mutex = threading.Lock()

    def advance(self, newest: int, today: int) -> None:
        assert today <= newest
        with self._mutex:
            self.newest, self.today = max(newest, self.newest), today
            self.days = {of: day for of, day in self.days.items() if self._has_day(day)}

    def put(self, keys: bytes, epochs: Any, days: Any) -> dict[str, int]:
        ends: Counter[str] = Counter()
        with self._mutex:
            self.puts += len(epochs)
            for at, (epoch, each) in enumerate(zip(epochs, days, strict=True)):
                of, day = (keys[16 * at : 16 * at + 16], int(epoch)), int(each)
                had = self.days.get(of)
                if not self._has_day(day):
                    ends["outside"] += 1
                elif had is not None and had >= day:
                    ends["already"] += 1
                else:
                    ends["added" if had is None else "renewed"] += 1
                    self.days[of] = day
        return dict(ends)

    def remove(self, key: bytes, epoch: int, day: int) -> bool:
        with self._mutex:
            if self.days.get((key, epoch)) != day:
                return False
            del self.days[key, epoch]
            return True

    def day_of(self, key: bytes, epoch: int) -> int | None:
        return self.days.get((key, epoch))

    def _has_day(self, day: int) -> bool:
        return self.newest - self.window < day <= self.newest

    def has(self, name: PagesName) -> bool:
        return self.days.get((name.key, name.epoch)) == name.day
