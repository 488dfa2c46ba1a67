"""Whether the files of a checkpoint are still those that this engine loaded its weights from. It
loads them first, and only then makes the connector, which fingerprints them: minutes later.

What changed since the engine began may have changed before or behind the load, which nobody tells
a connector. Files that vLLM itself downloads meanwhile are on the hub's side: of those the name of
the snapshot says what is in it, so that only another snapshot counts. vLLM asks the hub once, when
its configuration is made, for the commit of a revision, and takes all from there.

The file system's clock is compared with this host's. `began` belongs to the thread that starts the
engine, and all else only reads.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# As many links in a row as Linux follows.
_MOST_LINKS = 40

_began_s = 0.0


def began() -> None:
    """An engine begins in this process, and has loaded nothing yet."""
    global _began_s
    _began_s = time.time()


def began_s() -> float:
    """No weights of this process's engine were read before. Its process's own start, which may be
    long before, is the answer where vLLM's plugins are shut out."""
    return _began_s or _process_began_s()


def changed_file(model_config: Any, model: str, path: str) -> str:
    """What of a checkpoint is not, or may not be, as it was loaded; "" where all of it is. model:
    what the engine was asked for; path: where its files are."""
    if path == model:
        return _changed_since(Path(path), began_s())
    commit = getattr(model_config.revision, "resolved", "")  # huggingface_hub's ResolvedRevision
    if commit:
        return "" if Path(path).name == commit else path
    # vLLM could not ask the hub.
    revision = model_config.revision or "main"
    reference = Path(path).parent.parent / "refs" / revision
    return str(reference) if _newer(reference, began_s()) else ""


def _changed_since(root: Path, moment_s: float) -> str:
    return next((str(place) for place in _places(root) if _newer(place, moment_s)), "")


def _places(root: Path) -> Iterator[Path]:
    """What kvw.fingerprint() reads, and the links that lead there."""
    yield from _links(root)
    yield root
    seen = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        place = os.stat(folder)
        if (place.st_dev, place.st_ino) in seen:
            folders.clear()  # a link leads back
            continue
        seen.add((place.st_dev, place.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in folders)
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _links(path: Path, most: int = _MOST_LINKS) -> Iterator[Path]:
    """Each link on the way to a path, also those to which links lead."""
    path = Path(os.path.abspath(path))
    for place in (*reversed(path.parents), path):
        if place.is_symlink() and most:
            yield place
            yield from _links(place.parent / os.readlink(place), most - 1)


def _newer(place: Path, moment_s: float) -> bool:
    """Whether a file, a folder or a link was put there since, or written to. What is gone did not
    change: the fingerprint is of what is there."""
    try:
        if place.is_symlink() and place.lstat().st_ctime > moment_s:
            return True
        seen = place.stat()
    except FileNotFoundError:
        return False
    # A folder's content is looked at by itself; one that was moved there brings old files.
    moved = not stat.S_ISDIR(seen.st_mode) or seen.st_mtime <= moment_s
    return seen.st_ctime > moment_s and moved


def _process_began_s() -> float:
    """Linux's proc_pid_stat(5): field 22, in ticks since the host's start."""
    text = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    ticks = int(text.rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
