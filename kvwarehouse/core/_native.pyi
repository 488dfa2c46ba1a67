"""The native core as Python sees it. Everything that works on pages takes whole batches and
releases the GIL. Errors are those of kvwarehouse.errors. Only kvwarehouse.core imports this."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

VERSION: str
SECRET_BYTES: int
MAX_SHARDS: int
MAX_PAGE_TOKENS: int
MAX_NAMESPACES: int
MAX_ENGINE_KEY_BYTES: int

def copy_path() -> str: ...
def io_engine_probe() -> str: ...  # "io_uring" or "pread"
def page_digest(data: NDArray[np.uint8], key: bytes, shard: int) -> int: ...
def copy_streaming(to: NDArray[np.uint8], source: NDArray[np.uint8]) -> None: ...
def chain_keys(
    secret: bytes, namespace_id: bytes, tokens: NDArray[Any], page_tokens: int
) -> NDArray[np.uint8]: ...  # (pages, 16)

ENDLESS: int  # pages of a tier without a bound

def check_object(
    fleet: bytes,
    secret: bytes,
    namespace_id: bytes,
    epoch: int,
    key: bytes,
    data: NDArray[np.uint8] | bytes | memoryview | PackedRun,
) -> tuple[str, int, int]:
    """An object of the remote tier, all but its name from its bytes: why a page of it is not what
    was put ("": all are), how many are good before it, and the bytes of a record (0: not known).
    Releases the GIL."""

def policy_names() -> list[str]: ...
def replay(
    pages: NDArray[np.uint32],
    ends: NDArray[np.uint64],
    ids: int,
    policy: str,
    capacities: tuple[int, int],
    leaves_first: bool,
    nvme_pages_per_day: int = 0,
    times_ns: NDArray[np.uint64] | None = None,
) -> dict[str, Any]: ...

# A trace against the eviction policies: request i asks for the chain pages[ends[i-1]:ends[i]], root
# first, of ids below `ids`; capacities of DRAM (ENDLESS: no bound) and NVMe (0: none) in pages.
# nvme_pages_per_day: that may be written (0: no bound); it needs times_ns, one a request, in order.
# {"dram_hits", "nvme_hits": uint32 a request; "dram", "nvme": {"written", "evicted", "refused",
# "spared"}}

def optimal_hits(
    pages: NDArray[np.uint32], ends: NDArray[np.uint64], ids: int, capacity: int
) -> dict[str, Any]: ...

# The same trace in a cache that knows the future: {"hits": uint32 a request, "written", "evicted",
# "refused"}.

def device_of(address: int) -> int:
    """The ordinal of the GPU whose memory has the address. Raises UsageError (code "no_gpu",
    "bad_device_memory")."""

def cuda_version() -> int:
    """Of CUDA that the driver speaks: 13000 is 13.0. Raises UsageError (code "no_gpu")."""

def device_capability(ordinal: int) -> tuple[int, int]:
    """Compute capability. Raises UsageError (code "no_gpu")."""

def wait_event(ordinal: int, event: int, timeout_s: float) -> bool:
    """Whether the CUevent, of that device, happened within the time; 0 has. Polls in this thread,
    without the GIL, and breaks no graph that another thread captures. Raises UsageError (code
    "no_gpu"), StorageError (code "gpu_error")."""

class Recorded:
    """An event behind what each stream of the device has queued by now; they end with this object.
    streams: handles, or 1 for CUDA's default stream and 2 for that of this thread. Waits for none.
    Raises UsageError (code "bad_stream" for one of another device, "no_gpu"), CapacityError (code
    "gpu_capture"), StorageError (code "gpu_error")."""

    def __init__(self, ordinal: int, streams: list[int]) -> None: ...
    @property
    def events(self) -> list[int]: ...

class GatherPlan:
    """A copy of pages in a device's memory, page i to `to` + i * page_bytes there."""

    def __init__(self, regions: Regions, to: int) -> None: ...
    @property
    def table_bytes(self) -> int: ...
    @property
    def device_bytes(self) -> int: ...
    def write(self, address: int) -> None:
        """Writes table_bytes to host memory there, 8-byte aligned."""

class DeviceGather:
    """Loads the kernels in `image` onto a device. Raises UsageError (code "no_gpu"), StorageError
    (code "gpu_error"), CapacityError (code "gpu_memory")."""

    def __init__(self, ordinal: int, image: bytes) -> None: ...
    def launch(self, plan: GatherPlan, tables: int, stream: int) -> None:
        """Queues the copy on a stream of the device's. tables: device_bytes of device memory,
        8-byte aligned, that begin with the plan's tables when the stream comes to it. Waits for
        nothing. Raises StorageError (code "gpu_error")."""

class RelaxedCaptureMode:
    """A with statement in which what this thread asks of a device breaks no graph that another
    thread captures. address: in the memory of a device whose primary context is the thread's
    meanwhile. Raises UsageError (code "no_gpu"); entering it code "bad_device_memory", StorageError
    (code "gpu_error")."""

    def __init__(self, address: int | None = None) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *unused: object) -> None: ...

def index_costs(counts: list[int], rounds: int) -> list[dict[str, Any]]: ...

# A table for each count: {"entries", "refused"; "hit_ns", "miss_ns", "replace_ns": of one
# operation, a value a round}. native/bench/index_cost.h

def presence_costs(objects: int, rounds: int) -> dict[str, Any]: ...

# {"objects"; "index_ns", "pages_ns", "runs_ns", "absent_ns": of one lookup, a value a round}.
# native/bench/presence_cost.h

class CoreOptions:
    """All fields are plain attributes; sizes in bytes."""

    socket_path: str
    arena_dir: str
    dram_bytes: int
    nvme_dir: str  # "" for none
    nvme_capacity_bytes: int
    nvme_segment_bytes: int  # 0: chosen from the capacity
    index_pages: int  # 0: chosen from the capacities
    hbm_bytes: int  # 0: no HBM tier
    hbm_device: int  # its ordinal
    warehouse_id: bytes  # 16
    secret: bytes  # SECRET_BYTES
    epoch: int  # the ledger's clear epoch
    epoch_floor: int  # clear epoch of what nobody declares; 2**64 - 1: the highest that is seen
    log_end: int  # of an NVMe tier that is not there: no record lies above it; 0: there is none
    policy: str  # one of policy_names()
    io_engine: str  # "auto", "io_uring", "pread"
    limbo_after_s: float  # 30
    grace_s: float  # 5
    flush_interval_s: float  # 1
    nvme_retry_s: float  # 30
    nvme_answer_s: float  # of recover(), for each answer of the disk; 0: for ever
    write_queue_bytes: int  # 0: chosen
    keep_bytes: int  # that keeps may hold
    nvme_bytes_per_day: int  # that NVMe may write; 0: no bound
    nvme_bytes_left: float  # of it, at the start
    remote_write: str  # which pages a remote tier gets: "" none, "reused", "all"
    remote_read: bool  # pages are fetched from a remote tier
    remote_fleet: bytes  # 16; of the file `presence`
    def __init__(self) -> None: ...

def check_options(options: CoreOptions) -> None:
    """Refuses what no Core starts with, before one writes anything; warehouse_id and secret may
    be missing yet. UsageError names the size, StorageError "newer_files" a newer version's file."""

def index_bytes(options: CoreOptions) -> int:
    """Of the index's file, for the pages that the tiers of `options` may hold."""

def table_bytes(options: CoreOptions) -> int:
    """Of memory that the core's own tables take beside that file once it names as many pages as it
    can, of 32 KiB and more, and what a recovery of them takes for a while: at most."""

class Core:
    """The daemon's core: owns the arena, the index, the NVMe log and the local socket, on threads
    of its own. Methods may be called from any thread; they wait for the core thread, at most
    ``timeout_s`` where given (else 10 s, 120 s over the whole index; then TransportError)."""

    def __init__(self, options: CoreOptions) -> None:
        """Takes the directory's lock. StorageError "owned" names the pid of another daemon."""
    def add_namespace(
        self,
        ordinal: int,
        id: bytes,
        page_tokens: int,
        shards: int,
        shard_bytes: int,
        clear_epoch: int,
    ) -> int:
        """Before start (from the ledger) or after. `ordinal` is a wish; returns the one it has from
        now on. UsageError if its pages fit no slab or segment."""
    def forget_namespace(self, ordinal: int) -> bytes:
        """Takes a namespace back that has no page, no store under way and no watcher (-1: of all
        those the one that was used longest ago). Returns its id, b"" where there is none."""
    def add_tombstone(self, key: bytes, position: int) -> None:
        """Before start: records of `key` up to a log position are dead. See evict()."""
    def log_end(self) -> int:
        """After recover: a log position that no record of now lies above; 0 without an NVMe
        tier."""
    def recover(self) -> dict[str, Any]:
        """Finds what is there, once, before start; nobody is served yet. Returns the report."""
    def start(self) -> dict[str, Any]:
        """Recovers where recover was not called, and listens. Returns the recovery report."""
    def listen_again(self) -> None:
        """Binds the socket anew where somebody removed its file; who is connected stays so."""
    def clear(self, ordinals: list[int], epoch: int) -> int:
        """Raises the epoch, and removes from all tiers what was reserved before it in these
        namespaces. Returns how many pages."""
    def raise_epoch(self, epoch: int) -> None: ...
    def evict(self, ordinal: int, pages: int, tiers: str) -> tuple[int, list[tuple[bytes, int]]]:
        """Takes the coldest pages of a namespace (-1: of all) out of "hbm", "dram", "nvme" or
        "all" ("hbm": its copies alone, the pages stay).
        Returns how many left, and (key, log position) of those that left NVMe, for tombstones;
        without that tier, of those that it may have (CoreOptions.log_end)."""
    def flush(self, timeout_s: float) -> dict[str, int]:
        """Waits until what was sealed before is on stable media: {"flushed", "not_admitted",
        "pending"}; pending is 0 unless the time ran out."""
    def drain(self) -> None:
        """Refuses new reservations until undrain."""
    def undrain(self) -> None: ...
    def sweep(self) -> int:
        """Drops orphan pages; returns how many."""
    def status(self) -> dict[str, Any]:
        """One snapshot: CoreStatus of proto/kvwarehouse/v1/status.proto, by its names."""
    def miss_ratio(self, ordinal: int) -> dict[str, Any]:
        """Of a namespace, or -1 for all: "uses", "uses_lost", "since_s", "share", "samples", and
        "sizes_bytes" with "hits": of the uses, those that a cache of each size would have hit."""
    def why(
        self,
        id: bytes,
        page_tokens: int,
        tokens: NDArray[np.uint32] | None,
        keys: Keys | None,
        searches: bool,
        as_of_ns: int,
    ) -> dict[str, Any]:
        """What there is of a prompt in a namespace, and why not the rest: "found" pages of its
        longest prefix; "runs" and "branches" as WhyRun and Branches of warehouse.proto. searches:
        where it has not even the first page, the first pages of others are looked for, for a
        second. as_of_ns: of that wall time, a moment ago; 0: of now. Blocks while the core serves
        others; UsageError "namespace_unknown"."""
    def keep(
        self,
        id: int,
        namespace_id: bytes,
        page_tokens: int,
        tokens: NDArray[np.uint32] | None,
        keys: Keys | None,
        ttl_s: float,
        is_renewed: bool,
        promote_s: float,
    ) -> dict[str, Any]:
        """Keeps of each run of the prompt what is stored of it, up to its first page that is not:
        "refusal" ("": none; else nothing is kept, for want of "keeps", "ends", "pages" or "bytes",
        or because it was "gone" meanwhile), "id", "left_s", "pages" (0: there is no keep), "bytes",
        "marks" (keys, for restore_keep). What is on NVMe alone is read into DRAM as far as that
        goes in promote_s. Blocks while the core serves others; UsageError "namespace_unknown",
        "bad_run" (a run that begins behind its prompt's first page)."""
    def restore_keep(
        self, id: int, marks: list[bytes], is_lone: bool, left_s: float, renewed_s: float
    ) -> str:
        """Between recover() and start(). renewed_s 0: use does not renew it. Says why there is no
        such keep, as keep() does; "": there is."""
    def end_keep(self, id: int) -> bool:
        """False: there is none."""
    def keeps(self) -> list[dict[str, Any]]:
        """All of them: "id", "left_s", "pages", "bytes"."""
    def pages(self, ordinal: int, after: int, limit: int) -> list[dict[str, Any]]:
        """From index position `after` on; each: id, namespace, key, parent, position, tiers, bytes,
        sealed_at_ns."""
    def check(self, ordinal: int, after: int, limit: int, repair: bool) -> dict[str, Any]:
        """Verifies a stretch of at most `limit` pages, in both tiers, from index position `after`
        on: {"next", "tiers": [{"tier", "pages", "bytes", "bad", "dropped", "dropped_bytes"}],
        "bad": [{"key", "tier", "reason"}]}; next < 0 at the end. Blocks for the device.
        CapacityError "check_busy" at the bound of checks at a time."""
    def take_tombstones(self) -> list[tuple[bytes, int]]:
        """(key, log position) of records quarantined, or left while reclaim moved them, since the
        last call that did not raise, for tombstones."""
    def events(self) -> list[tuple[str, dict[str, str]]]:
        """What happened since the last call that did not raise; bounded, drops are counted."""
    def watch(self, ordinal: int, tokens_only: bool) -> Feed:
        """What enters and leaves the tiers from now on, of a namespace (-1: of all), beginning
        with all that is stored. tokens_only: without pages that were stored by keys alone.
        CapacityError "too_many_watchers" at the bound."""
    def attach_remote(self, fd: int) -> None:
        """Takes over the core's end of a link with a worker of the remote tier, in place of the
        one before. What goes wrong on it closes it, and harms nobody else."""
    def attach_remote_gets(self, fd: int) -> None:
        """As attach_remote, of the link on which it gets runs; with it ends what was under way."""
    def set_remote_epoch(self, namespace_id: bytes, fleet_epoch: int, clear_epoch: int) -> bool:
        """Objects of this epoch are read and written from now on, until the namespace's next clear.
        False, and nothing is done: there is no such namespace, its clear epoch is not
        `clear_epoch`, or fleet_epoch is 2**64 - 1, which nothing can follow."""
    def stop_remote(self, namespace_id: bytes) -> None:
        """None are, until set_remote_epoch(). Nothing is done where there is no such namespace."""
    def stop(self) -> list[tuple[bytes, int]]:
        """Ends the threads and lets the directory go. Idempotent. Returns the last tombstones."""

FeedItem: TypeAlias = tuple[str, int, int, int, bytes, bytes, bool, bytes]
# (kind, tiers, namespace's ordinal, position, key, parent's key or b"", is the witness tokens?,
# witness: token ids as 32-bit little-endian, or the engine's key). Kinds: "cleared": forget all,
# what is stored follows; "stored", "removed": the page entered or left `tiers` (1 DRAM, 2 NVMe,
# 3 both); "synced": all that was stored at "cleared" has been said. A page comes after its parent.

class Feed:
    """One reader's view of changes: bounded; the core never waits for it. One thread at a time;
    close() from any."""

    def take(self, timeout_s: float) -> dict[str, Any]:
        """{"items": list[FeedItem], "lost": bool, "closed": bool}: all there is now; waits for
        something, at most timeout_s. lost: the reader was too slow, and nothing more is said until
        restart(). What was taken is lost where it raises: close it, and watch again."""
    def restart(self) -> None:
        """Everything again from "cleared" on; what was not taken is dropped."""
    def close(self) -> None:
        """Ends a waiting take(), and does not wait for the core. Idempotent."""

Keys: TypeAlias = list[bytes] | tuple[list[bytes], list[int], list[int], list[bytes | None]]
# One prompt's pages from its root; or runs: the keys of all, then pages, position of the first page
# and key of the page before (None at position 0) of each.

class NativeClient:
    """One session with a daemon, over its local socket and shared memory. Thread-safe. Pages are
    named by `tokens` (one-dimensional, 32 or 64 bit integers) or by `keys`, exactly one of them."""

    def __init__(
        self,
        socket_path: str,
        verify_always: bool,
        timeout_s: float,
        patience_s: float | None = None,
        read_only: bool = False,
        daemon_uid: int | None = None,
    ) -> None:
        """Connects, or raises TransportError at once when there is no daemon, or one that is
        neither of our user, nor root's, nor `daemon_uid`'s. patience_s: what a lookup, load or pin
        may spend on a new daemon; 0: they never look for one."""
    def close(self) -> None: ...
    @property
    def connected(self) -> bool: ...
    @property
    def session_id(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    def refresh(self, timeout_s: float) -> bool:
        """Finds the daemon again if it was replaced. False: none answered in time."""
    def sees_namespace(self, id: bytes) -> bool:
        """From the mapped control page; no call."""
    def clear_epoch(self, id: bytes) -> int | None:
        """Of a namespace, now; None: it is not there. From the mapped control page; no call."""
    def has_namespace(self, id: bytes) -> bool:
        """From the control page; finds a new daemon first if it must."""
    def lookup(
        self, id: bytes, tokens: NDArray[Any] | None, keys: Keys | None
    ) -> tuple[int, int, int, int]:
        """Pages of the longest stored prefix by where they are read from: HBM, DRAM, NVMe, and
        behind them, probably, the remote store. HBM: of a device that was used here, where the
        daemon has copies. No call."""
    def tiers(
        self, id: bytes, tokens: NDArray[Any] | None, keys: Keys | None, counted: bool = True
    ) -> NDArray[np.uint8]:
        """Where each page is: 0 missing, 1 DRAM, 2 NVMe, 3 HBM, 4 probably in the remote store;
        0 or 4 behind the first gap of a run. No call.
        counted: as a lookup, in the session's counters."""
    def release(self, id: bytes, tokens: NDArray[Any] | None, keys: Keys | None, first: int) -> int:
        """Says that the stored pages from `first` on are needed no more. How many. No call."""
    def tags(self, id: bytes, tokens: NDArray[Any] | None, keys: Keys | None) -> NDArray[np.uint64]:
        """(pages,): a word for each page, as good as its key for telling it apart. No call."""
    def load(
        self,
        id: bytes,
        tokens: NDArray[Any] | None,
        keys: Keys | None,
        first: int,
        regions: Regions,
        shard: int,
        timeout_s: float,
    ) -> tuple[int, dict[str, int]]:
        """Pages filled in order from `first` on, and reasons of what was not."""
    def store(
        self,
        id: bytes,
        tokens: NDArray[Any] | None,
        keys: Keys | None,
        first: int,
        regions: Regions,
        shard: int,
        timeout_s: float,
        since: int | None = None,
    ) -> tuple[int, int, dict[str, int]]:
        """Pages stored, already there, and dropped by reason. since: the clear epoch that they
        belong to."""
    def pin(
        self,
        id: bytes,
        tokens: NDArray[Any] | None,
        keys: Keys | None,
        first: int,
        timeout_s: float,
    ) -> Pins:
        """Pins from `first` on; promotes what is on NVMe, within timeout_s."""
    def use_device(self, ordinal: int, image: bytes) -> None:
        """Makes a GPU one that regions may lie in. image: the kernels, as a cubin or PTX for
        it."""
    def has_device(self, ordinal: int) -> bool: ...
    def device_stage(self, ordinal: int, bytes: int) -> DeviceStage: ...
    def stop_registering(self, timeout_s: float) -> bool: ...
    def registration(self) -> tuple[int, bool, str]:
        """Bytes of the arena that are registered with CUDA, whether that is all there will be, and
        why some are not ("": none was refused)."""
    def segments(self, timeout_s: float) -> str:
        """Path of the segments' folder, for any process of this user, until the client is closed or
        finds another daemon; "" where there is none."""
    def hold(
        self,
        id: bytes,
        tokens: NDArray[Any] | None,
        keys: Keys | None,
        window: tuple[int, int, int],
        timeout_s: float,
    ) -> Extents:
        """window: first page, pages at most, shard. Holds them where they are on NVMe, to the first
        that cannot be held; reads their records' headers, and blocks for them."""
    def pack_run(self, run: RunToPut, fleet: bytes) -> PackedRun:
        """An object of the run: its pages, which must be in DRAM, pinned, verified and copied."""
    def fill_run(
        self, run: RunToGet, body: bytes | memoryview, fleet: bytes, within_s: float
    ) -> FilledRun:
        """Stores the pages of an object that are good, of which `body` has the records from
        run.from_page on. Waits for room, and for pages that others are storing, within_s at
        most."""
    def control(self) -> dict[str, Any]:
        """The control page: warehouse, incarnation, heartbeat, rates, queues."""
    def counters(self) -> dict[str, int]:
        """This session's own."""

class Pins:
    """Pages held in DRAM until release(). Survives the daemon."""

    pages: int
    def release(self) -> None: ...

class Extents:
    """Pages held on NVMe until release(), for reading by the caller itself:
    native/client/extents.h. Survives the daemon. Release it after every transfer from it has
    ended."""

    pages: int
    page_bytes: int
    shard: int
    ended: str  # why it ended before the last page asked for; "none": it did not
    def files(self) -> list[tuple[str, int, bool, tuple[int, int]]]:
        """(path that opens it again, descriptor, is that O_DIRECT?, (device, inode))"""
    def plan(
        self, stage_bytes: int, gap_bytes: int
    ) -> list[tuple[int, int, int, int, int, int, int]]:
        """Transfers: (round, file, offset in it, bytes, offset in the stage, first page, pages);
        all offsets and sizes are multiples of 4096, and a round fits stage_bytes. Neighbours with
        at most gap_bytes between them come in one, gap included. UsageError "stage_too_small"."""
    def deliver(self, stage: NDArray[np.uint8], first: int, count: int, regions: Regions) -> int:
        """Verifies pages in the stage of the last plan and copies them to the same pages of
        `regions`, to the first that is not what its record says. Returns how many are there."""
    def release(self) -> None: ...

class DeviceStage:
    """Memory of a GPU where pages land that the caller reads by itself:
    native/client/device_stage.h. Its end frees the memory: after every transfer to it has ended."""

    ordinal: int
    bytes: int
    address: int
    def deliver(
        self, extents: Extents, first: int, count: int, regions: Regions, timeout_s: float
    ) -> int:
        """As Extents.deliver, to regions of the same device, verified by it. Fewer also where
        timeout_s was over before the device could begin."""

class Regions:
    """Where the pages of a load or a store lie in client memory. Keeps the buffers alive.
    pages(array): one contiguous row a page, uint8 (n, page_bytes).
    strided(...): page p is the pieces bases[j] + blocks[p, b] * strides[j], of piece_bytes[j]
    bytes, for each of its blocks b and each piece j, block by block."""

    @staticmethod
    def pages(array: Any, writable: bool) -> Regions: ...
    @staticmethod
    def strided(
        owners: list[Any],
        bases: NDArray[np.uint64],
        strides: NDArray[np.int64],
        piece_bytes: NDArray[np.uint64],
        blocks: NDArray[np.int64],
    ) -> Regions: ...
    def on_device(self, ordinal: int, ready: list[int]) -> Regions:
        """The same, in the memory of a GPU; ready: CUevents, which outlive it."""
    def gather(self, rows: NDArray[np.uint8]) -> None:
        """Copies all pages to `rows`, (count, page_bytes), writable."""
    def scatter(self, rows: NDArray[np.uint8]) -> None:
        """Overwrites all pages with `rows`."""
    @property
    def count(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...

class PresenceFile:
    """The file `presence`, which says what a remote store has, and its one writer. Thread-safe."""

    def __init__(self, path: str, fleet: bytes, objects: int, days: int, today: int) -> None:
        """Opens it, or makes it anew where it is none of this fleet and geometry, damaged, or its
        newest day is after `today` or more than `days` before."""
    @property
    def made_anew(self) -> bool: ...
    @property
    def newest(self) -> int: ...  # day
    @property
    def objects(self) -> int: ...
    @property
    def cells(self) -> int: ...
    def objects_of(self, day: int) -> int: ...
    def advance(self, newest: int, today: int) -> None:
        """Drops what is too old for a later newest day; an earlier one is ignored. Today, by which
        readers tell what is of an earlier day, may be before it."""
    def put(
        self, keys: bytes, epochs: NDArray[np.uint64], days: NDArray[np.uint32]
    ) -> dict[str, int]:
        """keys: 16 bytes each. How many were "added", "renewed", "already" there, "replaced" older
        ones, found "no_room" or are of a day "outside" the window."""
    def remove(self, key: bytes, epoch: int, day: int) -> bool: ...
    def day_of(self, key: bytes, epoch: int) -> int | None: ...
    def close(self) -> None:
        """Idempotent; every other call raises UsageError "closed" then."""

class RunToPut:
    """A run of pages that the daemon would have in the remote store. RemoteLink gives them; one
    that is made by hand is on no link."""

    def __init__(
        self,
        namespace_id: bytes,
        key: bytes,
        first_position: int,
        pages: int,
        epoch: int,
        day: int | None,
        record_bytes: int,
    ) -> None: ...
    @property
    def namespace_id(self) -> bytes: ...
    @property
    def key(self) -> bytes: ...  # of its last page
    @property
    def first_position(self) -> int: ...
    @property
    def pages(self) -> int: ...
    @property
    def epoch(self) -> int: ...  # the fleet's, of the namespace
    @property
    def day(self) -> int | None: ...  # the store has it under that day: wants a refresh
    @property
    def record_bytes(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class RemoteLink:
    """The worker's end of its link with the daemon. Thread-safe."""

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over. UsageError "bad_link": it is no SOCK_SEQPACKET socket."""
    def ready(self, puts: int) -> None:
        """The file `presence` can be read, and so many runs, 1 to 64, may be under way from now on.
        Said again where the file was made anew."""
    def next(self, timeout_s: float) -> RunToPut | None:
        """The next run, or None: none came in time. Raises TransportError "link_closed"."""
    def done(self, run: RunToPut) -> None:
        """Ends a run that next() gave, however it went: another may come. What the file `presence`
        says by then is why it is not offered again. TransportError "link_closed"."""
    def close(self) -> None:
        """Whoever waits in next() is told that it is closed. Idempotent."""

GET_ENDS: tuple[str, ...]
# How a get ends: "filled", "missing", "damaged", "failed", "late", "no_room", "cleared"
# (native/remote/get_link.h).

class RunToGet:
    """A run of pages that clients wait for: the records of an object from page `from_page` on.
    RemoteGetLink gives them; one that is made by hand is on no link."""

    def __init__(
        self,
        *,
        namespace_id: bytes,
        key: bytes,
        epoch: int,
        clear_epoch: int,
        record_bytes: int,
        within_s: float,
        first_position: int,
        pages: int,
        from_page: int,
        day: int,
        engine_keys: bool,
    ) -> None: ...
    @property
    def namespace_id(self) -> bytes: ...
    @property
    def key(self) -> bytes: ...  # of its last page
    @property
    def epoch(self) -> int: ...  # the fleet's, of the namespace
    @property
    def clear_epoch(self) -> int: ...  # the host's as of the fleet's: what is stored is as old
    @property
    def record_bytes(self) -> int: ...
    @property
    def within_s(self) -> float: ...  # from when next() gave it; nobody waits any longer
    @property
    def first_position(self) -> int: ...
    @property
    def pages(self) -> int: ...  # of the object
    @property
    def from_page(self) -> int: ...
    @property
    def day(self) -> int: ...
    @property
    def engine_keys(self) -> bool: ...  # the pages' witnesses: engines' keys, not token ids
    @property
    def begin(self) -> int: ...  # of the bytes that are wanted, in the object
    @property
    def end(self) -> int: ...

class RemoteGetLink:
    """The worker's end of its link for gets. Thread-safe. Methods raise TransportError
    "link_closed" where the daemon has ended it."""

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over. UsageError "bad_link": it is no SOCK_SEQPACKET socket."""
    def ready(self, gets: int) -> None:
        """So many runs, 1 to 64, may be under way from now on; UsageError "bad_gets" else. Said
        before the first state()."""
    def state(self, until_ns: int, read_bytes_per_s: int, first_byte_ns: int) -> None:
        """Said once a second: until when, by CLOCK_BOOTTIME, anything may be asked for (0: nothing
        may), and how fast it would come (smoothed; 0: not measured yet). Nothing is served once
        this is 5 s old."""
    def next(self, timeout_s: float) -> RunToGet | None:
        """The next run, or None: none came in time."""
    def done(self, run: RunToGet, end: str, pages: int) -> None:
        """Ends a run that next() gave, once; `end` is of GET_ENDS (UsageError "bad_end"), `pages`
        how many of those that were wanted are stored now."""
    def close(self) -> None:
        """Whoever waits in next() is told that it is closed. Idempotent."""

class FilledRun:
    """What became of an object's pages: native/client/fill_run.h."""

    @property
    def end(self) -> str: ...  # of GET_ENDS
    @property
    def pages(self) -> int: ...  # from the first wanted one on, that are stored now
    @property
    def fault(self) -> str: ...  # what was wrong; "parent_missing": nothing was begun
    @property
    def parent(self) -> bytes: ...  # then: the page that has to be stored before them

class PackedRun:
    """An object, as a buffer of its bytes where `reason` is "". Else "not_in_dram", "damaged",
    "cleared", "unknown_namespace", or what native/remote/object.h says."""

    @property
    def reason(self) -> str: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
