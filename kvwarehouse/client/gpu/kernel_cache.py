"""Compiled kernels that outlive their process. NVRTC takes seconds for them, and each process of an
engine would wait for it at every start.

    $XDG_CACHE_HOME/kvwarehouse/kernels/KEY      BLAKE2b-256 of the image, then the image

What runs on the device is as good as code of this process. So a file is believed only where nobody
but this process's user and root could have written it, and only whole; what is not is compiled anew
and replaced. A folder that cannot be written costs the time and nothing else. Thread-safe, and
between processes too: files are put in their place whole.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvwarehouse import trusted_file
from kvwarehouse.atomic_file import write_atomic
from kvwarehouse.errors import UsageError
from kvwarehouse.places import cache_folder

_KEPT: Final = 16
"""The newest: other devices and compilers, earlier versions of the kernels. About 100 KB each."""
_CHECK_BYTES: Final = 32


def key_of(source: bytes, architecture: str, compiler: tuple[int, int]) -> str:
    """What an image depends on. `compiler`: NVRTC's version."""
    text = f"1 {architecture} {compiler[0]}.{compiler[1]}\n".encode()
    return hashlib.blake2b(text + source, digest_size=16).hexdigest()


def recall(key: str) -> bytes | None:
    """None: there is no image that can be believed."""
    try:
        stored = trusted_file.read(str(_folder() / key), "the compiled kernels in", secret=True)
    except UsageError:
        return None
    image = stored[_CHECK_BYTES:]
    return image if image and stored[:_CHECK_BYTES] == _check(image) else None


def remember(key: str, image: bytes) -> None:
    folder = _folder()
    with suppress(OSError):  # it is compiled again next time
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_image(folder / key, image)
        _drop_oldest(folder)


def write_image(file: Path, image: bytes) -> None:
    """Raises OSError."""
    write_atomic(str(file), _check(image) + image)


def _drop_oldest(folder: Path) -> None:
    by_age = sorted(folder.iterdir(), key=lambda each: each.stat().st_mtime)
    for each in by_age[:-_KEPT]:
        each.unlink(missing_ok=True)


def _folder() -> Path:
    return Path(cache_folder()) / "kernels"


def _check(image: bytes) -> bytes:
    return hashlib.blake2b(image, digest_size=_CHECK_BYTES).digest()
