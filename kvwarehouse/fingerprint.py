"""Fingerprints of model weights: what a Namespace's `weights` should be.

A checkpoint is read, never its path alone: the same files elsewhere have the same fingerprint, and
other weights at the same path have another. No torch. Stateless; thread-safe.

Format, version 1 ("kvw1:KIND:32 hex digits"): blake2b-128 over, for each file in order of its
relative name, that name, its size and its digest; docs/format.md has the exact bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvwarehouse.errors import UsageError

_VERSION = "kvw1"
_BLOCK_BYTES = 4096
_TENSOR_BLOCKS = 6
_OPAQUE_BLOCKS = 1024
_OPAQUE_WHOLE_BYTES = 8 << 20
_READ_BYTES = 4 << 20
_READERS = 8
_MAX_FILES = 20_000
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself
_WEIGHT_BYTES = 1 << 20
_WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".npz", ".h5", ".msgpack")
)
_PATH_STARTS = ("/", "./", "../", "~")


def fingerprint(path_or_text: str | os.PathLike[str], *, full: bool = False) -> str:
    """Names the weights of a model by their content.

    path_or_text: a checkpoint directory or file (safetensors; .bin, .pt, .gguf and all others as
    opaque bytes), or, where it is not an existing path, a text that names the weights, such as
    "my-model@3f2c1a". Symlinks are followed, so a hub cache and a copy of it are equal. Hidden
    files and directories are left out, every other file counts, config.json included.

    full=False reads every tensor's header and six 4 KiB blocks of its content (first, last, and
    four between; a small tensor whole), and of an opaque file over 8 MiB 1,024 blocks: a second or
    less for a checkpoint of a thousand tensors. full=True reads every byte.

    Residual risk. A sampled fingerprint does not see a change that leaves every sampled block as it
    was, such as a few edited elements inside one large tensor; training, quantizing, merging an
    adapter or another seed change nearly every block. Where weights are edited in place, use
    full=True. A text is only as good as the discipline behind it: two different weights under one
    text would share KV. The prefixes differ, so text, sampled and full never equal one another.

    Returns text such as "kvw1:sampled:0f...". Blocks for the reading. Raises UsageError: no such
    path (for text that looks like one), nothing in it that holds weights, a damaged file."""
    path = _existing_path(path_or_text)
    if path is None:
        text = str(path_or_text)
        digest = hashlib.blake2b(
            text.encode("utf-8"), digest_size=16, person=b"kvw text"
        ).hexdigest()
        return f"{_VERSION}:text:{digest}"
    files = list(_files(path))
    _check_has_weights(path, files)
    with ThreadPoolExecutor(max_workers=min(_READERS, len(files))) as pool:
        digests = list(pool.map(lambda file: _file_digest(file, full), files))
    total = _hasher()
    for file, content in zip(files, digests, strict=True):
        _feed(total, file.name.encode("utf-8", "surrogateescape"))
        _feed(total, str(file.size_bytes).encode())
        _feed(total, content)
    return f"{_VERSION}:{'full' if full else 'sampled'}:{total.hexdigest()}"


@dataclass(frozen=True)
class _File:
    path: Path
    name: str
    """Relative to the directory, with "/"; empty for a checkpoint that is one file."""
    size_bytes: int


def _existing_path(given: str | os.PathLike[str]) -> Path | None:
    if not isinstance(given, str | os.PathLike):
        raise _bad(given, f"is of type {type(given).__name__}; pass a path or a text")
    text = os.fspath(given)
    if not text.strip():
        raise _bad(given, "is empty; pass a checkpoint's path or a text that names the weights")
    path = Path(text).expanduser()
    try:
        if path.exists():
            return path
    except (OSError, ValueError):
        pass  # too long, or with a zero byte: cannot be a path, so it is text
    if not isinstance(given, str) or _looks_like_path(given):
        raise _bad(given, "does not exist; give the checkpoint's directory, or a text without path")
    return None


def _looks_like_path(text: str) -> bool:
    return text.startswith(_PATH_STARTS) or Path(text).suffix.lower() in _WEIGHT_SUFFIXES


def _files(root: Path) -> Iterator[_File]:
    """The regular files, by relative name. Directories reached twice through links count once."""
    if not root.is_dir():
        yield _File(root, "", _regular_size(root) or 0)
        return
    found: list[_File] = []
    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=_unreadable):
        place = os.stat(folder)
        if (place.st_dev, place.st_ino) in seen:
            folders.clear()
            continue
        seen.add((place.st_dev, place.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            size = None if name.startswith(".") else _regular_size(path)
            if size is not None:
                found.append(_File(path, path.relative_to(root).as_posix(), size))
        if len(found) > _MAX_FILES:
            raise _bad(
                root, f"has over {_MAX_FILES} files, so it is no checkpoint; name its folder"
            )
    yield from sorted(found, key=lambda file: file.name)


def _regular_size(path: Path) -> int | None:
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(error) from error
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _unreadable(error: OSError) -> UsageError:
    """The error, for `raise`; raised here when os.walk calls it."""
    bad = _bad(error.filename, f"cannot be read ({error.strerror}); finish its download or fix it")
    raise bad from error


def _check_has_weights(root: Path, files: list[_File]) -> None:
    for file in files:
        if file.path.suffix.lower() in _WEIGHT_SUFFIXES or file.size_bytes >= _WEIGHT_BYTES:
            return
    raise _bad(
        root,
        f"holds no weights ({len(files)} small files), and a fingerprint without them would let"
        " two models share KV; give the directory that has the .safetensors files",
    )


def _file_digest(file: _File, full: bool) -> bytes:
    state = _hasher()
    try:
        with file.path.open("rb", buffering=0) as opened:
            if full:
                ranges = _pieces(0, file.size_bytes)
            elif file.path.suffix.lower() == ".safetensors":
                ranges = _tensor_samples(file, opened.fileno())
            else:
                ranges = _opaque_samples(file.size_bytes)
            for offset, size_bytes in ranges:
                state.update(_read(file, opened.fileno(), offset, size_bytes))
    except OSError as error:
        error.filename = error.filename or str(file.path)
        raise _unreadable(error) from error
    return state.digest()


def _tensor_samples(file: _File, descriptor: int) -> Iterator[tuple[int, int]]:
    """Ranges of a safetensors file to hash: the whole header, then samples of each tensor.

    Format: https://github.com/huggingface/safetensors#format - an 8-byte little-endian length, that
    many bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}}, then the data."""
    length = int.from_bytes(_read(file, descriptor, 0, min(8, file.size_bytes)), "little")
    if file.size_bytes < 8 or length > min(file.size_bytes - 8, _MAX_HEADER_BYTES):
        raise _damaged(file, "its header's length is impossible")
    try:
        header = json.loads(_read(file, descriptor, 8, length))
    except ValueError as error:
        raise _damaged(file, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _damaged(file, "its header is not a table of tensors")
    yield from _pieces(0, 8 + length)
    for name in sorted(header):
        if name == "__metadata__":
            continue
        begin, end = _data_offsets(file, name, header[name], file.size_bytes - 8 - length)
        yield from _spread(8 + length + begin, end - begin, _TENSOR_BLOCKS)


def _data_offsets(file: _File, name: str, tensor: Any, data_bytes: int) -> tuple[int, int]:
    offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(offset) is int for offset in offsets)
        or not 0 <= offsets[0] <= offsets[1] <= data_bytes
    ):
        raise _damaged(file, f"tensor {name!r} lies outside of it")
    return offsets[0], offsets[1]


def _opaque_samples(size_bytes: int) -> Iterator[tuple[int, int]]:
    if size_bytes <= _OPAQUE_WHOLE_BYTES:
        return _pieces(0, size_bytes)
    return _spread(0, size_bytes, _OPAQUE_BLOCKS)


def _spread(begin: int, size_bytes: int, blocks: int) -> Iterator[tuple[int, int]]:
    """`blocks` blocks at even distances, the first and the last among them; or all, if few."""
    if size_bytes <= blocks * _BLOCK_BYTES:
        yield from _pieces(begin, size_bytes)
        return
    room = size_bytes - _BLOCK_BYTES
    for place in range(blocks):
        yield begin + room * place // (blocks - 1), _BLOCK_BYTES


def _pieces(begin: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    for offset in range(begin, begin + size_bytes, _READ_BYTES):
        yield offset, min(_READ_BYTES, begin + size_bytes - offset)


def _read(file: _File, descriptor: int, offset: int, size_bytes: int) -> bytes:
    data = os.pread(descriptor, size_bytes, offset)
    while len(data) < size_bytes:
        more = os.pread(descriptor, size_bytes - len(data), offset + len(data))
        if not more:
            raise _damaged(file, "it became shorter while it was read")
        data += more
    return data


def _hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16, person=b"kvw weights")


def _feed(state: hashlib.blake2b, item: bytes) -> None:
    state.update(len(item).to_bytes(8, "little") + item)


def _damaged(file: _File, problem: str) -> UsageError:
    return _bad(
        file.path,
        f"is damaged: {problem}; download it again (a Git LFS pointer needs `git lfs pull`)",
    )


def _bad(given: object, problem: str) -> UsageError:
    shown = os.fspath(given) if isinstance(given, os.PathLike) else given
    text = repr(shown)
    if len(text) > 200:
        text = text[:200] + "..."
    return UsageError(
        f"fingerprint: {text} {problem}", code="bad_fingerprint", context={"value": text}
    )
