"""A bundle for a bug report: what is known of a daemon and its host, in one file, without secrets.

make_bundle(BundleRequest(address), os.environ, "report.tar.gz")
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvwarehouse.bundle.archive import Archive
from kvwarehouse.bundle.collecting import Collected, collect
from kvwarehouse.bundle.redaction import Redactor
from kvwarehouse.bundle.sources import BundleRequest, Sources

__all__ = ["Bundle", "BundleRequest", "Member", "make_bundle"]


@dataclass(frozen=True)
class Member:
    name: str
    what: str
    size_bytes: int
    took_s: float
    problem: str
    """Why it says nothing but this; "" where it has what it is for."""


@dataclass(frozen=True)
class Bundle:
    path: str
    size_bytes: int
    pid: int | None
    reachable: bool
    """Whether the daemon has answered."""
    members: tuple[Member, ...]

    @property
    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "file": self.path,
            "size_bytes": self.size_bytes,
            "pid": self.pid,
            "daemon_answers": self.reachable,
            "members": [dict(vars(each)) for each in self.members],
        }


def make_bundle(
    asked: BundleRequest,
    environment: Mapping[str, str],
    path: str,
    *,
    on_source: Callable[[str], None] = lambda name: None,
) -> Bundle:
    """Blocks for at most the sum of the deadlines; a daemon that hangs costs some of them. Raises
    UsageError where the file cannot be written. environment: this process's."""
    sources = Sources(asked, environment)
    found = []
    for source in sources.all():
        on_source(source.what)
        found.append(collect(source))
    environments, lines = sources.secrets()
    redactor = Redactor(lines)
    for each in environments:
        redactor.learn_variables(each)
    archive = Archive(redactor)
    members = tuple(_add(archive, redactor, each) for each in found)
    about = {
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "address": asked.address,
        "pid": sources.pid,
        "daemon_answers": sources.reachable,
        "members": [dict(vars(each)) for each in members],
    }
    archive.add("manifest.json", json.dumps(about, indent=1) + "\n")
    return Bundle(path, archive.write(path), sources.pid, sources.reachable, members)


def _add(archive: Archive, redactor: Redactor, each: Collected) -> Member:
    source = each.source
    text = each.text if not each.problem else f"(not there: {each.problem})\n"
    size = archive.add(source.name, text, keep_end=source.keep_end)
    problem = redactor.text(each.problem)
    return Member(source.name, source.what, size, round(each.took_s, 3), problem)
