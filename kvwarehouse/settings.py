"""The kinds of values that settings have: how each is read, checked and shown; and files of
settings. Stateless."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from kvwarehouse import trusted_file
from kvwarehouse.addresses import is_loopback
from kvwarehouse.errors import UsageError
from kvwarehouse.sizes import parse_size

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>\d{1,5})"
)
_ENDPOINT = re.compile(
    r"tcp://(?P<host>\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})|ipc://(?P<path>/.+)"
)
_DAYS = re.compile(r"([0-9]{1,4})d")
_URL_CHARS = 1024
_DAILY_LEAST, _DAILY_MOST = 0.001, 1000
_IPC_PATH_CHARS = 100  # of a Unix socket, with room for its terminator
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))

OFF = "off"

SHARED_SCHEMES: Final = ("s3", "gs", "az", "file")
"""Of URLs of stores that several hosts can reach."""


@dataclass(frozen=True)
class Kind:
    """Reads a value (text, or what TOML has) given by `name`; raises UsageError that names both."""

    shown: str
    read: Callable[[Any, str], Any]
    show: Callable[[Any], str | int | float] = lambda value: value

    def __call__(self, value: Any, name: str) -> Any:
        return self.read(value, name)


def setting(default: Any, kind: Kind, meaning: str, why: str, *, key: str = "") -> Any:
    """A dataclass field with its meaning, its default and why that; `key`: its name outside."""
    metadata = {"parse": kind, "meaning": meaning, "why": why, "key": key}
    return dataclasses.field(default=default, metadata=metadata)


def read_table(path: str, flag: str, known: Collection[str], advice: str) -> dict[str, Any]:
    """Of the file of settings (TOML) that `flag` names, values as they stand there. Raises
    UsageError that names the file where it is not to be believed; with `advice`, where it is no
    TOML or has a setting that is not among the `known`."""
    text = trusted_file.read(path, flag, secret=False)
    try:
        table = tomllib.loads(text.decode("utf-8"))
    # ValueError: text of another encoding, numbers of thousands of digits; RecursionError: nesting.
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{flag} {path!r} is not TOML: {error}; {advice}", code="bad_config"
        ) from error
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise UsageError(
            f"{path}: unknown setting {unknown[0]!r}; the settings are {', '.join(known)}; "
            f"{advice}",
            code="bad_config",
        )
    return table


def exact_size(size_bytes: int) -> str:
    """`size_bytes` in the largest unit that divides it: reads back to the same number."""
    for unit, suffix in _UNITS:
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{suffix}"
    return f"{size_bytes}B"


def endpoint_is_local(endpoint: str) -> bool:
    """Whether a checked ZeroMQ endpoint can only be reached from this host."""
    if endpoint.startswith("ipc://"):
        return True
    address = endpoint.removeprefix("tcp://")
    return not address.startswith("*") and is_loopback(address)


def choice(*choices: str) -> Kind:
    def read(value: Any, name: str) -> str:
        if value not in choices:
            raise _bad(name, value, f"is not one of {', '.join(choices)}")
        return str(value)

    return Kind("|".join(choices), read)


def count(least: int, most: int) -> Kind:
    def read(value: Any, name: str) -> int:
        number = _number(value, name, int, "a whole number")
        if not least <= number <= most:
            raise _bad(name, value, f"is out of range; use {least} to {most}")
        return int(number)

    return Kind("N", read)


def seconds(least: float, most: float) -> Kind:
    def read(value: Any, name: str) -> float:
        number = float(_number(value, name, float, "a number of seconds"))
        if not least <= number <= most:
            raise _bad(name, value, f"is out of range; use {least:g} to {most:g} seconds")
        return number

    return Kind("SECONDS", read)


def days(least: int, most: int) -> Kind:
    def read(value: Any, name: str) -> int:
        match = _DAYS.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise _bad(name, value, f"is no number of whole days; write {least}d to {most}d")
        if not least <= int(match[1]) <= most:
            raise _bad(name, value, f"is out of range; use {least}d to {most}d")
        return int(match[1])

    return Kind("DAYS", read, lambda value: f"{value}d")


def _read_daily(value: Any, name: str) -> str:
    """As it stands; "" is none."""
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if text in ("", "0"):
        return ""
    daily_bytes(_text(text, name, "a number of drive writes, or a size"), name, 1 << 40)
    return str(text)


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def daily_bytes(text: str, name: str, capacity_bytes: int) -> int:
    """Of so many bytes as `capacity_bytes` says a number of times, "0.5", or of a size, "500GB".
    Raises UsageError."""
    if not is_number(text):
        size_bytes = parse_size(text, name=name)
    else:
        times = float(text)
        if not _DAILY_LEAST <= times <= _DAILY_MOST:
            raise _bad(
                name,
                text,
                f"is out of range; use {_DAILY_LEAST:g} to {_DAILY_MOST:g} times the capacity, or "
                "a size such as 500GB",
            )
        size_bytes = int(times * capacity_bytes)
    if size_bytes < 1:
        raise _bad(name, text, "allows no write; use more, or no NVMe tier")
    return size_bytes


def _number(value: Any, name: str, to: type[int] | type[float], what: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _bad(name, value, f"is not {what}")
    if isinstance(value, float) and to is int:
        raise _bad(name, value, f"is not {what}")
    try:
        return to(value)
    except (ValueError, OverflowError):
        raise _bad(name, value, f"is not {what}") from None


def _text(value: Any, name: str, what: str) -> str:
    if not isinstance(value, str):
        raise _bad(name, value, f"is not {what}; write it as text in quotes")
    if not value.isprintable():
        raise _bad(name, value, "has control characters; remove them")
    return value


def _read_path(value: Any, name: str) -> str:
    text = _text(value, name, "a path")
    return os.path.abspath(os.path.expanduser(text)) if text else ""


def _read_name(value: Any, name: str) -> str:
    text = _text(value, name, "a name")
    if not _NAME.fullmatch(text):
        raise _bad(name, value, "is no name; use 1 to 32 of A-Z a-z 0-9 . _ - (it is in paths)")
    return text


def _read_address(value: Any, name: str) -> str:
    text = _text(value, name, "an address")
    match = _ADDRESS.fullmatch(text)
    if text and (match is None or int(match["port"]) > 65535 or not _is_host(match["six"])):
        raise _bad(
            name, value, "is no address; write host:port, such as 127.0.0.1:7070 or [::1]:7070"
        )
    return text


def _is_host(six: str | None) -> bool:
    if six is None:
        return True
    try:
        return ipaddress.ip_address(six).version == 6
    except ValueError:
        return False


def _read_endpoint(value: Any, name: str) -> str:
    if value == "":
        return ""
    match = _ENDPOINT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _bad(
            name,
            value,
            "is no endpoint of ZeroMQ that is supported; write tcp://HOST:PORT, such as "
            "tcp://127.0.0.1:5557, or ipc:///PATH",
        )
    if match["path"] and len(match["path"]) > _IPC_PATH_CHARS:
        raise _bad(name, value, f"has a path of over {_IPC_PATH_CHARS} characters; shorten it")
    if match["port"] and not 1 <= int(match["port"]) <= 65535:
        raise _bad(name, value, "has no port from 1 to 65535")
    return str(value)


def _read_store_url(value: Any, name: str) -> str:
    parts = _split_url(value, name)
    if parts is None:
        return ""
    known = parts.scheme in SHARED_SCHEMES
    # A folder is of this host, and buckets have names.
    if not known or bool(parts.netloc) == (parts.scheme == "file") or parts.path == "//":
        raise _bad(
            name,
            value,
            "is no store that hosts can share; write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
            "az://CONTAINER/PREFIX or file:///MOUNTED/FOLDER",
        )
    return str(value)


def _read_web_url(value: Any, name: str) -> str:
    parts = _split_url(value, name)
    if parts is not None and (parts.scheme not in ("http", "https") or not parts.netloc):
        raise _bad(name, value, "is no address of a store; write https://HOST:PORT")
    return "" if parts is None else str(value)


def _split_url(value: Any, name: str) -> SplitResult | None:
    """None for "". What may be a secret is in no error."""
    if value == "":
        return None
    if not isinstance(value, str) or len(value) > _URL_CHARS or not value.isprintable():
        raise UsageError(
            f"{name} is not a URL of at most {_URL_CHARS} printable characters", code="bad_config"
        )
    try:
        parts = urlsplit(value)
    except ValueError as error:
        raise UsageError(f"{name} is no URL: {error}", code="bad_config") from error
    if "@" in parts.netloc or "?" in value or "#" in value:
        raise UsageError(
            f"{name} has a user, a password or a query in its URL ({parts.scheme}://...), and what "
            "a command line has is seen by all users of the host; leave it out: credentials are "
            "those of the environment or of files, as the store's own tools read them",
            code="bad_config",
        )
    return parts


def _read_text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > 1024 or not value.isprintable():
        raise _bad(name, value, "is not text of at most 1024 printable characters")
    return value


def _read_http(value: Any, name: str) -> str:
    if value in (OFF, ""):
        return OFF
    return _read_address(value, name)


def _bad(name: str, value: object, problem: str) -> UsageError:
    return UsageError(
        f"{name} {value!r} {problem}",
        code="bad_config",
        context={"name": name, "value": value},
    )


path = Kind("PATH", _read_path)
daily = Kind("N|SIZE", _read_daily)
name = Kind("NAME", _read_name)
address = Kind("HOST:PORT", _read_address)
http_address = Kind("HOST:PORT|off", _read_http)
endpoint = Kind("ENDPOINT", _read_endpoint)
text = Kind("TEXT", _read_text)
size = Kind("SIZE", lambda value, name: parse_size(value, name=name), exact_size)
store_url = Kind("URL", _read_store_url)
web_url = Kind("URL", _read_web_url)
