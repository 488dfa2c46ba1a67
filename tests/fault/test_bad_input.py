"""What callers and strangers do wrong: the error names the value and the fix, the daemon stays up,
and the client that did it works on."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import RefusedError, Serving
from testkit.known_prompt import KnownPrompt

pytestmark = pytest.mark.timeout(180)

PAGE_BYTES = 4096
NODES = list(range(10))
TOKENS = list(range(20))
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=2, page_bytes=PAGE_BYTES,
    shards=2,
)  # fmt: skip
WAIT_S = 60


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("bad-input"), dram="16MiB") as serving:
        with serving.connect() as client:
            ns = client.open(SPACE)
            for shard in (0, 1):
                stored = ns.store(TOKENS, whole(shard), shard, timeout_s=WAIT_S).stored
                assert stored == len(NODES)
        yield serving


@pytest.fixture(params=["local", "remote"])
def client(request: pytest.FixtureRequest, serving: Serving) -> Iterator[kvw.Client]:
    connect = serving.connect if request.param == "local" else serving.connect_remote
    with connect(timeout_s=WAIT_S) as client:
        yield client
        check_alive(client)


def whole(shard: int) -> Any:
    return pages_of(NODES, shard, 0, PAGE_BYTES)


def check_alive(client: kvw.Client) -> None:
    """The same client, and what was stored before all of it."""
    for shard in (0, 1):
        out = np.zeros((len(NODES), PAGE_BYTES), np.uint8)
        assert client.open(SPACE).load(TOKENS, out, shard=shard, timeout_s=WAIT_S) == len(NODES)
        check_pages(out, NODES, shard, 0)
    core = client.status()["core"]
    assert core["quarantined"] == 0
    assert core["tiers"]["dram"]["pages"] == len(NODES)


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


# What is wrong with the pages, and what the error has to say.
PAGES: dict[str, tuple[Callable[[], Any], str]] = {
    "too_few": (lambda: whole(0)[:9], "9 pages; expected 10"),
    "too_many": (lambda: np.vstack([whole(0), whole(0)]), "20 pages; expected 10"),
    "narrow": (lambda: whole(0)[:, :-1].copy(), r"4095\).*4096"),
    "flat": (lambda: whole(0).ravel(), r"\(40960,\).*4096"),
    "signed": (lambda: whole(0).view(np.int8), "int8.*uint8"),
    "floats": (lambda: np.zeros((10, PAGE_BYTES // 4), np.float32), "float32.*uint8"),
    "strided": (lambda: np.zeros((20, PAGE_BYTES), np.uint8)[::2], "strides.*contiguous"),
    "reversed": (lambda: whole(0)[::-1], "strides.*contiguous"),
    "transposed": (lambda: np.zeros((PAGE_BYTES, 10), np.uint8).T, "strides.*contiguous"),
    "text": (lambda: "pages", "str"),
    "list": (lambda: [[1, 2], [3, 4]], "list"),
    "none": (lambda: None, "missing"),
}


@pytest.mark.parametrize("wrong", PAGES)
def test_wrong_pages_are_refused_by_what_is_wrong_with_them(client: kvw.Client, wrong: str) -> None:
    make, said = PAGES[wrong]
    ns = client.open(SPACE)
    with pytest.raises(kvw.UsageError, match=said) as caught:
        ns.store(TOKENS, make())
    assert caught.value.code == "bad_pages"
    if wrong not in ("too_few", "too_many"):
        with pytest.raises(kvw.UsageError, match=said):
            ns.load(TOKENS, make())


def test_load_into_a_read_only_buffer_is_refused_and_a_store_from_one_is_not(
    client: kvw.Client,
) -> None:
    ns = client.open(SPACE)
    with pytest.raises(kvw.UsageError, match="read-only"):
        ns.load(TOKENS, read_only(np.zeros((10, PAGE_BYTES), np.uint8)))
    frozen = memoryview(bytes(10 * PAGE_BYTES)).cast("B", (10, PAGE_BYTES))
    with pytest.raises(kvw.UsageError, match="read-only"):
        ns.load(TOKENS, frozen)
    assert ns.store(TOKENS, read_only(whole(0)), timeout_s=WAIT_S).already == len(NODES)


TOKEN_LISTS: dict[str, tuple[Callable[[], Any], str]] = {
    "negative": (lambda: [1, -1], r"tokens\[1\] = -1 .*0 to 4294967295"),
    "too_large": (lambda: [0, 1, 2**32], r"tokens\[2\] = 4294967296"),
    "huge": (lambda: [10**30, 1], r"tokens\[0\] = 10{30}"),
    "negative_array": (lambda: np.array([5, 6, -7], np.int16), r"tokens\[2\] = -7"),
    "large_array": (lambda: np.array([5, 2**40], np.int64), rf"tokens\[1\] = {2**40}"),
    "floats": (lambda: np.array([1.0, 2.0]), "float64.*integers"),
    "float_list": (lambda: [1, 2.5], r"tokens\[1\] = 2.5"),
    "bools": (lambda: [True, False], r"tokens\[0\] = True"),
    "text": (lambda: "tokens", "str"),
    "bytes": (lambda: b"tokens", "bytes"),
    "matrix": (lambda: np.zeros((2, 2), np.int32), "2 dimensions"),
    "objects": (lambda: [object(), 1], r"tokens\[0\]"),
    "none": (lambda: None, "tokens or keys"),
    "too_many": (lambda: np.zeros(1_048_577, np.int32), "1048577 .*1048576"),
}


@pytest.mark.parametrize("wrong", TOKEN_LISTS)
def test_wrong_tokens_are_refused_by_place_and_value(client: kvw.Client, wrong: str) -> None:
    make, said = TOKEN_LISTS[wrong]
    ns = client.open(SPACE)
    out = np.zeros((10, PAGE_BYTES), np.uint8)
    for call in (
        lambda: ns.lookup(make()), lambda: ns.load(make(), out), lambda: ns.store(make(), out),
        lambda: ns.pin(make()),
    ):  # fmt: skip
        with pytest.raises(kvw.UsageError, match=said):
            call()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"shard": 2}, "shard = 2 .*last shard is 1"),
        ({"shard": -1}, "shard = -1"),
        ({"shard": "0"}, "shard = '0'"),
        ({"shard": True}, "shard = True"),
        ({"first": 11}, "first = 11 .*10 whole pages"),
        ({"first": -1}, "first = -1"),
        ({"timeout_s": -1}, "timeout_s = -1"),
        ({"timeout_s": float("nan")}, "timeout_s = nan"),
        ({"timeout_s": float("inf")}, "timeout_s = inf"),
        ({"timeout_s": "soon"}, "timeout_s = 'soon'"),
        ({"keys": [b"k"]}, "either tokens or keys"),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_value(
    client: kvw.Client, arguments: dict[str, Any], said: str
) -> None:
    ns = client.open(SPACE)
    out = np.zeros((10, PAGE_BYTES), np.uint8)
    for call in (ns.load, ns.store):
        with pytest.raises(kvw.UsageError, match=said):
            call(TOKENS, out, **arguments)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([b""], r"keys\[0\] is 0 bytes"),
        ([b"k" * 65], r"keys\[0\] is 65 bytes.*64"),
        ([b"k", "k"], r"keys\[1\] is str"),
        (b"key", "bytes"),
        ([b"k"] * 65_537, "65537 .*65536"),
    ],
)
def test_wrong_keys_are_refused_by_place(client: kvw.Client, keys: Any, said: str) -> None:
    ns = client.open(SPACE)
    with pytest.raises(kvw.UsageError, match=said):
        ns.lookup(keys=keys)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"page_bytes": 3 << 20}, "slab has 2097152"),
        ({"page_bytes": 1 << 20, "shards": 3}, "3 shards of 1048576.*slab has 2097152"),
        ({"page_bytes": 1 << 30, "shards": 64}, "slab has 2097152"),
    ],
)
def test_pages_that_fit_no_slab_are_refused_at_open_with_what_would_fit(
    client: kvw.Client, fields: dict[str, int], said: str
) -> None:
    shape = {"page_tokens": 2, "shards": 1, **fields}
    space = kvw.Namespace(model="huge", weights="w", dtype="b", layout="t/1", **shape)  # type: ignore[arg-type]
    with pytest.raises(kvw.UsageError, match=said) as caught:
        client.open(space)
    assert "fewer tokens per page" in str(caught.value)
    assert "larger --dram" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"page_tokens": 0}, "page_tokens = 0 .*1 to 4096"),
        ({"page_tokens": 4097}, "page_tokens = 4097 .*1 to 4096"),
        ({"page_bytes": 0}, "page_bytes = 0 .*1 to 1073741824"),
        ({"page_bytes": 2**30 + 1}, "page_bytes = 1073741825"),
        ({"page_bytes": 1.5}, "page_bytes = 1.5 .*whole number"),
        ({"shards": 0}, "shards = 0 .*1 to 64"),
        ({"shards": 65}, "shards = 65 .*1 to 64"),
        ({"shards": True}, "shards = True"),
        ({"model": ""}, "model = '' is empty"),
        ({"model": "m" * 1025}, "model .*1025 characters.*1024"),
        ({"weights": None}, "weights = None"),
        ({"layout": "a\nb"}, "layout .*control"),
        ({"extra": {"a": 1}}, "extra"),
        ({"extra": {str(n): "" for n in range(65)}}, "64 entries"),
    ],
)
def test_namespace_fields_out_of_range_are_refused_by_name_and_bound(
    fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(kvw.UsageError, match=said) as caught:
        kvw.Namespace(**{**SPACE.to_fields(), **fields})
    assert caught.value.code == "bad_namespace"


def test_longest_prompt_of_engine_keys_and_tokens_is_taken(client: kvw.Client) -> None:
    """Just inside the bounds: no message on the way is too large for its transport."""
    ns = client.open(SPACE)
    assert ns.lookup(np.zeros(1_048_576, np.int32)).pages == 0
    assert ns.lookup(keys=[os.urandom(64) for _ in range(65_536)]).pages == 0
    wide = kvw.Namespace(
        model="tokens", weights="w", dtype="b", layout="t/1", page_tokens=4096, page_bytes=64
    )
    tokens = np.arange(40 * 4096, dtype=np.uint32)  # 16 KiB of tokens a page, 40 of them a store
    ns = client.open(wide)
    pages = np.full((40, 64), 7, np.uint8)
    result = ns.store(tokens, pages, timeout_s=WAIT_S)
    assert result.stored + result.already == 40
    assert ns.load(tokens, np.zeros_like(pages), timeout_s=WAIT_S) == 40
    client.clear(wide)


# --- strangers at the sockets


@pytest.mark.parametrize("suffix", ["", ".grpc"])
def test_garbage_on_a_socket_ends_that_connection_alone(
    serving: Serving, client: kvw.Client, rng: random.Random, suffix: str
) -> None:
    kind = socket.SOCK_STREAM if suffix else socket.SOCK_SEQPACKET
    for size in (0, 1, 31, 32, 33, 200, 4096, 100_000):
        with socket.socket(socket.AF_UNIX, kind) as stranger:
            stranger.settimeout(WAIT_S)
            stranger.connect(serving.socket + suffix)
            try:
                stranger.send(rng.randbytes(size))
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
            except OSError:
                pass  # hung up on, or too large for a packet: as good
    check_alive(client)


def test_true_messages_with_wrong_insides_are_refused_or_hung_up_on(
    serving: Serving, client: kvw.Client, rng: random.Random
) -> None:
    """Heads as native/exchange/messages.h has them, bodies of noise and counts of fantasy."""
    for kind in range(14):
        for _ in range(12):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.settimeout(WAIT_S)
                stranger.connect(serving.socket)
                said_hello = rng.random() < 0.5
                if said_hello:
                    stranger.send(message(1, bytes(16)))
                    stranger.recv(1 << 17)
                body = rng.randbytes(rng.choice([0, 8, 16, 24, 48, 200]))
                counts = rng.choice([0, 1, 3, 8192, 8193, 2**32 - 1]), rng.choice([0, 1, 2**31])
                stranger.send(message(kind, body, *counts))
                stranger.recv(1 << 17)  # a refusal, or nothing: hung up on
    check_alive(client)


def message(kind: int, body: bytes, first: int = 0, second: int = 0) -> bytes:
    head = np.zeros(1, "u4,u2,u2,u8,u4,u4,u4,u4")
    head[0] = (0x3157564B, 1, kind, 1, 32 + len(body), first, second, 0)
    return head.tobytes() + body


# --- starting


def refused(serving: Serving) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        serving.start()
    serving.remove()
    assert caught.value.status != 0
    return caught.value


def test_second_daemon_on_the_same_directories_names_the_first(
    serving: Serving, tmp_path: Path
) -> None:
    error = refused(Serving(tmp_path, arena_dir=str(serving.arena_dir)))
    assert f"pid {serving.pid}" in error.text
    assert "--name" in error.text


def test_socket_in_use_is_refused_with_its_path(serving: Serving, tmp_path: Path) -> None:
    assert serving.socket in refused(Serving(tmp_path, socket=serving.socket)).text
    other = Serving(tmp_path)
    path = other.folder / "other.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.bind(str(path))
        stranger.listen()
        other.settings["socket"] = str(path)
        assert str(path) in refused(other).text
    file = Serving(tmp_path)
    (file.folder / "file").write_text("mine")
    file.settings["socket"] = str(file.folder / "file")
    with pytest.raises(RefusedError) as caught:
        file.start()
    assert str(file.folder / "file") in caught.value.text
    assert (file.folder / "file").read_text() == "mine"
    file.remove()


def test_connecting_to_no_daemon_says_at_once_how_to_start_one(tmp_path: Path) -> None:
    for address in ("unix:///tmp/kvw-nobody.sock", "127.0.0.1:9"):
        with pytest.raises(kvw.TransportError) as caught:
            kvw.connect(address, timeout_s=WAIT_S)
        assert address.removeprefix("unix://") in str(caught.value)
        assert "kvwarehouse serve" in str(caught.value)


def tier_health(client: kvw.Client) -> str:
    health: str = client.status()["core"]["tiers"]["dram"]["health"]
    return health


def test_wrong_dram_for_an_arena_that_is_there_is_refused_and_loses_nothing(
    tmp_path: Path,
) -> None:
    with Serving(tmp_path, dram="16MiB") as own:
        with own.connect() as client:
            ns = client.open(SPACE)
            for shard in (0, 1):
                ns.store(TOKENS, whole(shard), shard, timeout_s=WAIT_S)
            # What it has not taken yet, a smaller daemon need not have.
            eventually(
                lambda: tier_health(client) != "populating" or None, "all of the arena is taken"
            )
            own.kill()
            # Smaller only where no client is alive, as this one is.
            for dram, said in (
                ("8MiB", "to --dram 8MiB while clients have it mapped (1); stop them, start with"),
                ("512MiB", "can grow to"),
            ):
                own.settings["dram"] = dram
                with pytest.raises(RefusedError) as caught:
                    own.start()
                assert said in caught.value.text
                assert "remove the directory: what NVMe has" in caught.value.text
        own.settings["dram"] = "16MiB"
        own.start()
        with own.connect() as client:
            check_alive(client)


def test_pages_that_fit_no_slab_of_a_smaller_arena_wait_on_nvme_for_a_larger_one(
    tmp_path: Path,
) -> None:
    prompt = KnownPrompt("large", pages=2, page_bytes=3 << 20)
    own = Serving(tmp_path, dram="32MiB", nvme_capacity="64MiB", nvme_segment="16MiB")
    with own:
        with own.connect() as client:
            prompt.store_whole(client)
            assert client.flush(60).pending == 0
        own.kill()
        own.lose_arena()
        own.settings["dram"] = "16MiB"
        own.start()
        assert own.events("namespace_unusable")
        with own.connect() as client, pytest.raises(kvw.UsageError, match="--dram"):
            client.open(prompt.space)
        own.stop()
        own.lose_arena()
        own.settings["dram"] = "32MiB"
        own.start()
        with own.connect() as client:
            assert prompt.load(client) == prompt.pages


def files_in(serving: Serving) -> dict[str, bytes]:
    """All but the lock, which says the pid of who tried."""
    return {
        str(path): path.read_bytes()
        for folder in (serving.arena_dir, serving.nvme_dir)
        for path in folder.rglob("*")
        if path.is_file() and path.name != "daemon.lock"
    }


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nvme_capacity": "3MiB"}, "room for at least 4"),
        ({"nvme_capacity": "5GiB", "nvme_segment": "64KiB"}, "give a larger --nvme-segment"),
        ({"nvme_capacity": "900TB", "nvme_segment": "0"}, "does not fit"),
        ({"nvme_segment": "5000"}, "multiple of 4096"),
        ({"dram": "4MiB"}, "at least 8 MiB"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_size_that_no_tier_can_have_is_refused_before_a_file_is_written(
    wrong: dict[str, str], said: str, tmp_path: Path
) -> None:
    own = Serving(
        tmp_path, **{"dram": "8MiB", "nvme_capacity": "8MiB", "nvme_segment": "1MiB", **wrong}
    )
    with pytest.raises(RefusedError) as caught:
        own.start()
    assert said in caught.value.text
    assert files_in(own) == {}
    own.remove()


SMALL_SHM = r"""
import re
import sys
from pathlib import Path
import numpy as np
import kvwarehouse as kvw
from kvwarehouse_bench.harness.serving import RefusedError, Serving
from kvwarehouse_bench.harness.eventually import eventually
disk = Path(sys.argv[1])
try:
    with Serving(disk, dram="128MiB"):
        sys.exit("128 MiB were found in 64")
except RefusedError as error:
    print(error.text)
    advice = re.search(r"use --dram (\d+MiB)", error.text)[1]
space = kvw.Namespace("m", "w", "uint8", "t/1", page_tokens=1, page_bytes=65536)
with Serving(disk, dram=advice) as serving, serving.connect() as client:
    ns = client.open(space)
    pages = np.random.default_rng(1).integers(0, 256, (100, 65536), dtype=np.uint8)
    assert ns.store(range(100), pages, timeout_s=30).stored == 100
    out = np.zeros_like(pages)
    assert ns.load(range(100), out) == 100 and (out == pages).all()
    # Somebody else fills the rest of it: no new sessions, and no daemon that dies of SIGBUS.
    with open("/dev/shm/fill", "wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 20)):
                pass
        except OSError:
            pass
    out[:] = 0
    assert ns.load(range(100), out) == 100 and (out == pages).all()
    assert ns.store(range(1000, 1100), pages, timeout_s=30).stored == 100
    try:
        serving.connect(timeout_s=30).close()
    except kvw.WarehouseError as error:
        print("session:", error)
    status = client.status()
    assert status["state"] == "serving"
print("served")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small /dev/shm needs root")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs the unshare program")
def test_shared_memory_of_64_mib_is_refused_by_size_or_served_within(tmp_path: Path) -> None:
    inside = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", inside, "sh"]
    tried = subprocess.run([*command, "true"], capture_output=True, timeout=WAIT_S, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no private mount here: {tried.stderr.decode().strip()}")
    done = subprocess.run(
        [*command, sys.executable, "-P", "-c", SMALL_SHM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for said in ("--dram 128 MiB does not fit", "/dev/shm (64 MiB)", "--shm-size", "served"):
        assert said in done.stdout, done.stdout
