"""Memory of the device that processes share, and memory of the host that the driver registers."""

from __future__ import annotations

import ctypes
import os
import tempfile
from typing import Final

from kvwarehouse_bench.gpu.facts.driver import (
    HOST_PORTABLE,
    MIB,
    READ,
    READ_WRITE,
    REGISTER_READ_ONLY,
    DriverCard,
    mapped,
    say,
    timed,
)

_PINNED: Final = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED."""
_BY_DESCRIPTOR: Final = 1
"""CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR."""
_ON_DEVICE: Final = 1
"""CU_MEM_LOCATION_TYPE_DEVICE."""
_GRANULARITIES: Final = {0: "minimum", 1: "recommended"}
_RIGHTS: Final = {1: "READ", 3: "READWRITE"}
"""CU_MEM_ACCESS_FLAGS_PROT_..."""
_SHARED_BYTES: Final = 64 * MIB
_ALIGNMENT_BYTES: Final = 2 * MIB
_AGAIN_BYTES: Final = 4096


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def shared(card: DriverCard) -> None:
    """As the HBM tier does it: made, handed over by a descriptor, mapped."""
    cuda, nothing = card.cuda, ctypes.c_uint64(0)
    place = _Location(_ON_DEVICE, 0)
    properties = _Properties(_PINNED, _BY_DESCRIPTOR, place, None, 0)
    for option, name in _GRANULARITIES.items():
        found = ctypes.c_size_t()
        about = ctypes.byref(properties)
        cuda.must("cuMemGetAllocationGranularity", ctypes.byref(found), about, option)
        say("granularity", name, found.value)
    handle, other, address = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
    file, size = ctypes.c_int(-1), ctypes.c_size_t(_SHARED_BYTES)
    cuda.must("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), nothing)
    cuda.must("cuMemExportToShareableHandle", ctypes.byref(file), handle, _BY_DESCRIPTOR, nothing)
    kept = "inheritable" if os.get_inheritable(file.value) else "FD_CLOEXEC"
    say("exported fd", os.readlink(f"/proc/self/fd/{file.value}"), kept)
    given = ctypes.c_void_p(file.value)
    cuda.must("cuMemImportFromShareableHandle", ctypes.byref(other), given, _BY_DESCRIPTOR)
    alignment = ctypes.c_size_t(_ALIGNMENT_BYTES)
    cuda.must("cuMemAddressReserve", ctypes.byref(address), size, alignment, nothing, nothing)
    cuda.must("cuMemMap", address, size, ctypes.c_size_t(0), other, nothing)
    for flags, name in _RIGHTS.items():
        access, one = _Access(place, flags), ctypes.c_size_t(1)
        result = cuda.ask("cuMemSetAccess", address, size, ctypes.byref(access), one)
        say("cuMemSetAccess", name, "->", result)
    for call in ("cuMemUnmap", "cuMemAddressFree"):
        cuda.must(call, address, size)
    cuda.must("cuMemRelease", other)
    cuda.must("cuMemRelease", handle)
    os.close(file.value)


def registered(card: DriverCard, disk: str, size_bytes: int) -> None:
    """Files of /dev/shm in small and in huge pages, and of a folder on a disk."""
    for folder, what, huge in (
        ("/dev/shm", "tmpfs", False),
        ("/dev/shm", "tmpfs", True),
        (disk, "disk", False),
    ):
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            with mapped(file.fileno(), size_bytes, READ_WRITE, huge=huge) as address:
                _writable(card, address, size_bytes, f"{what} {'huge' if huge else '4 KiB'}")
                with mapped(file.fileno(), size_bytes, READ) as read_only:
                    _read_only(card, read_only, size_bytes, what)


def _writable(card: DriverCard, address: int, size_bytes: int, what: str) -> None:
    took_us, result = timed(lambda: register(card, address, size_bytes))
    say(f"register {size_bytes // MIB} MiB, {what} writable -> {result} {took_us / 1e3:.1f} ms")
    if result != 0:
        return
    say("  again ->", register(card, address, _AGAIN_BYTES))
    took_us, result = timed(lambda: unregister(card, address))
    say(f"  unregister -> {result} {took_us / 1e3:.1f} ms")


def _read_only(card: DriverCard, address: int, size_bytes: int, what: str) -> None:
    for flags, name in ((0, "plain"), (REGISTER_READ_ONLY, "READ_ONLY")):
        result = register(card, address, size_bytes, flags)
        say("register", what, "read-only mapping,", name, "->", result)
        if result == 0:
            unregister(card, address)


def register(card: DriverCard, address: int, size_bytes: int, flags: int = 0) -> int:
    size = ctypes.c_size_t(size_bytes)
    return card.cuda.ask(
        "cuMemHostRegister_v2", ctypes.c_void_p(address), size, HOST_PORTABLE | flags
    )


def unregister(card: DriverCard, address: int) -> int:
    return card.cuda.ask("cuMemHostUnregister", ctypes.c_void_p(address))
