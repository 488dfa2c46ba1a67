"""The file that --remote-config names: how the remote tier reaches its store (TOML). It is believed
as the daemon's own configuration is. No credentials: those are the environment's. Stateless;
thread-safe.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from kvwarehouse import settings
from kvwarehouse.settings import setting


@dataclass(frozen=True)
class RemoteFile:
    """What is not in the file has its default."""

    endpoint: str = setting(
        "",
        settings.web_url,
        "Where a store answers that is not the cloud's own: https://HOST:PORT. http:// is without "
        "TLS.",
        "the cloud's own address follows from the URL",
    )
    region: str = setting(
        "",
        settings.text,
        "Region of a bucket of S3.",
        "that of the environment, as the cloud's own tools read it",
    )
    ca_file: str = setting(
        "",
        settings.path,
        "PEM file with certificates of an authority of one's own.",
        "the authorities that the host trusts",
    )
    connect_s: float = setting(
        0.3,
        settings.seconds(0.01, 60),
        "How long a connection may take, in seconds.",
        "within a data center a millisecond",
    )
    get_deadline_s: float = setting(
        1.5,
        settings.seconds(0.01, 600),
        "How long a get may take, in seconds.",
        "16 MiB at 1 Gbit/s take 0.14 s; what takes longer is sooner computed",
    )
    put_deadline_s: float = setting(
        10.0,
        settings.seconds(0.01, 600),
        "How long a put, a delete, or a part of a listing may take, in seconds.",
        "nobody waits for a put",
    )
    puts: int = setting(
        2,
        settings.count(1, 32),
        "Puts at the same time; each holds one object in memory, 16 MiB and seldom more.",
        "two keep a network busy while one is packed",
    )
    gets: int = setting(
        8,
        settings.count(1, 64),
        "Gets at the same time; together they hold 128 MiB in memory at most.",
        "eight at a time hide what each waits for, on networks of up to 100 Gbit/s",
    )
    write_bytes_per_s: int = setting(
        0,
        settings.size,
        "How much this host puts in a second at most. 0: no bound.",
        "the network is there to be used; where engines need it themselves, name a share",
    )


_FIELDS: Final = {item.name: item for item in dataclasses.fields(RemoteFile)}


def read(path: str) -> RemoteFile:
    """Of the file at `path`; the defaults for "". Raises UsageError that names the file, and the
    key that is unknown or bad."""
    if not path:
        return RemoteFile()
    advice = "credentials are those of the environment"
    table = settings.read_table(path, "--remote-config", _FIELDS, advice)
    values = {
        key: _FIELDS[key].metadata["parse"](value, f"{path}: {key}") for key, value in table.items()
    }
    return RemoteFile(**values)
