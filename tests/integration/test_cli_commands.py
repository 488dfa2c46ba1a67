"""The administrative commands, against the real service over a model of the core."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwarehouse import Namespace
from kvwarehouse.cli import main
from kvwarehouse.cli.connection import add_connection, address_from, find_namespace
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse.errors import TransportError, UsageError
from testkit.served import Served

SPACES = [
    Namespace(model=model, weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=4096)
    for model in ("alpha", "beta [v2]")
]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Ten pages of "alpha", three of "beta"; the environment says where."""
    with Served(tmp_path) as served:
        address = f"unix://{served.config.socket}"
        monkeypatch.setenv("KVW_ADDRESS", address)
        with connect_grpc(address) as client:
            for space, pages in zip(SPACES, (10, 3), strict=True):
                client.open(space).store(range(4 * pages), np.zeros((pages, 4096), np.uint8))
        yield served


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command; returns its exit status and what it printed (--json: decoded)."""

    def run(*arguments: str) -> tuple[int, Any]:
        status = main(list(arguments))
        text = capsys.readouterr().out
        return status, json.loads(text) if "--json" in arguments else text

    return run


def test_status_shows_tiers_and_hits(served: Served, shown: Any) -> None:
    status, text = shown("status")
    assert status == Exit.OK
    for word in ("serving", "dram", "nvme", "hit in dram", "16 MiB"):
        assert word in text


def test_status_as_json_is_the_status_of_the_service(served: Served, shown: Any) -> None:
    _, status = shown("status", "--json")
    assert status["core"]["index"]["pages"] == 13
    assert status["state"] == "serving"


def test_ls_shows_in_what_namespaces_of_a_model_differ(served: Served, shown: Any) -> None:
    """Incident: eight equal lines, of which an operator could not pick a tenant or an adapter."""
    changes = (
        {"weights": "v2"}, {"adapter": "lora-7"}, {"salt": "tenant secret"}, {"cache_group": "swa"},
        {"attention_backend": "flash"}, {"extra": {"a": "b"}}, {"weights": "w" * 1000},
    )  # fmt: skip
    with connect_grpc(f"unix://{served.config.socket}") as client:
        for change in changes:
            client.open(dataclasses.replace(SPACES[0], **change))
    _, text = shown("ls")
    lines = {line.partition("apart by")[0][14:] for line in text.splitlines() if "alpha" in line}
    assert len(lines) == len(changes) + 1
    for told in (
        "weights=v2",
        "adapter=lora-7",
        "salt=sha256:",
        "cache_group=swa",
        "extra={'a': 'b'}",
    ):
        assert told in text
    everywhere = [text, json.dumps(shown("ls", "--json")[1]), served.log.getvalue()]
    with (
        connect_grpc(f"unix://{served.config.socket}") as client,
        pytest.raises(UsageError, match="salt=sha256:") as caught,
    ):
        find_namespace(client, "alpha")
    assert not any("tenant secret" in each for each in (*everywhere, caught.value.message))
    beta = next(line for line in text.splitlines() if "beta" in line)
    assert "=" not in beta


def test_names_that_the_output_has_no_letters_for_are_shown_escaped(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: a model of a Chinese name and a C locale: a traceback of rich."""
    with connect_grpc(f"unix://{served.config.socket}") as client:
        client.open(dataclasses.replace(SPACES[0], model="模型"))
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", pipe)
    assert main(["ls"]) == Exit.OK
    pipe.flush()
    assert rb"\u6a21\u578b" in pipe.buffer.getvalue()  # type: ignore[attr-defined]


def test_ls_lists_namespaces(served: Served, shown: Any) -> None:
    _, text = shown("ls")
    assert "alpha" in text
    assert "beta [v2]" in text, "square brackets are no markup"
    assert "10 (40 KiB)" in text
    _, listed = shown("ls", "--json")
    assert [each["dram_bytes"] for each in listed["namespaces"]] == [40960, 12288]
    _, listed = shown("ls", "--json")
    assert {each["id"] for each in listed["namespaces"]} == {space.id.hex() for space in SPACES}


@pytest.mark.parametrize("name", ["alpha", SPACES[0].id.hex(), SPACES[0].id.hex()[:10].upper()])
def test_ls_lists_pages_of_a_namespace_by_its_model_or_id(
    served: Served, shown: Any, name: str
) -> None:
    _, listed = shown("ls", name, "--json")
    assert len(listed["pages"]) == 10
    assert not listed["more"]


def test_ls_says_when_there_are_more_pages_than_it_shows(served: Served, shown: Any) -> None:
    _, listed = shown("ls", "alpha", "--limit", "4", "--json")
    assert (len(listed["pages"]), listed["more"]) == (4, True)
    _, text = shown("ls", "alpha", "--limit", "4")
    assert "--limit" in text


@pytest.mark.parametrize("name", ["gamma", ""])
def test_namespace_that_is_none_or_many_is_refused_with_the_choices(
    served: Served, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", name]) == Exit.USAGE
    said = capsys.readouterr().err
    assert "alpha" in said
    assert "beta" in said


@pytest.mark.parametrize(
    "command",
    [
        ("clear", "", "--yes"),
        ("evict", "", "--pages", "9"),
        ("check", ""),
        ("advise", ""),
        ("ls", ""),
    ],
)
def test_empty_name_is_no_namespace_where_there_is_but_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: Any, command: tuple[str, ...]
) -> None:
    """As of a variable of a shell that was never set: `kvwarehouse clear "$NS" --yes`."""
    with Served(tmp_path) as served:
        monkeypatch.setenv("KVW_ADDRESS", f"unix://{served.config.socket}")
        with connect_grpc(f"unix://{served.config.socket}") as client:
            client.open(SPACES[0]).store(range(40), np.zeros((10, 4096), np.uint8))
        assert shown(*command)[0] == Exit.USAGE
        assert shown("status", "--json")[1]["core"]["index"]["pages"] == 10


@pytest.mark.parametrize("flag", ["--address", "--socket", "--name"])
@pytest.mark.parametrize(
    "command",
    [
        ("clear", "--all", "--yes"),
        ("evict", "--all", "--pages", "9"),
        ("drain",),
        ("check", "--repair"),
    ],
)
def test_empty_address_is_not_the_default_daemon(
    served: Served, command: tuple[str, ...], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Incident: `kvwarehouse clear --all --yes --address "$GPU7"`, of which the variable was not
    set, cleared the warehouse of the host that it ran on."""
    assert main([*command, flag, ""]) == Exit.USAGE
    assert f"{flag} is empty" in capsys.readouterr().err
    assert len(served.core.slots) == 13
    assert not served.core.draining


@pytest.mark.parametrize("flag", ["--nvme-dir", "--arena-dir"])
def test_empty_directory_is_not_the_running_daemon(
    served: Served, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Incident: `kvwarehouse check --repair --nvme-dir "$DIR"` without DIR repaired the daemon."""
    assert main(["check", "--repair", flag, ""]) == Exit.USAGE
    assert f"{flag} is empty" in capsys.readouterr().err


def test_clear_removes_the_pages_of_one_namespace(served: Served, shown: Any) -> None:
    assert shown("clear", "alpha", "--yes", "--json") == (Exit.OK, {"cleared": 10})
    _, status = shown("status", "--json")
    assert status["core"]["index"]["pages"] == 3


def test_clear_of_all_namespaces_is_asked_for_by_name(served: Served, shown: Any) -> None:
    assert shown("clear", "--all", "--yes", "--json") == (Exit.OK, {"cleared": 13})


def test_clear_without_anyone_to_ask_removes_nothing(served: Served, shown: Any) -> None:
    assert shown("clear", "alpha")[0] == Exit.USAGE
    assert shown("status", "--json")[1]["core"]["index"]["pages"] == 13


class Terminal(io.StringIO):
    """Somebody who types this, and then ends the input."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "status", "left"),
    [("y\n", Exit.OK, 3), ("YES\n", Exit.OK, 3), ("n\n", Exit.FAILED, 13), ("\n", Exit.FAILED, 13),
     ("", Exit.FAILED, 13)],
)  # fmt: skip
def test_clear_asks_on_stderr_and_takes_the_end_of_input_for_a_no(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: str,
    status: Exit,
    left: int,
) -> None:
    """Incident: Ctrl-D was a traceback, and `clear x --json > file` waited without a question."""
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    assert main(["clear", "alpha", "--json"]) == status
    shown = capsys.readouterr()
    assert "Remove all pages of" in shown.err
    assert shown.err.endswith("[y/N] " if status == Exit.OK else "nothing was cleared\n")
    if status == Exit.OK:
        assert json.loads(shown.out) == {"cleared": 10}
    else:
        assert shown.out == ""
    assert len(served.core.slots) == left


def test_evict_takes_as_many_pages_as_it_is_told(served: Served, shown: Any) -> None:
    assert shown("evict", "--all", "--pages", "5", "--json") == (Exit.OK, {"evicted": 5})
    assert shown("evict", "alpha", "--pages", "100")[0] == Exit.OK


def test_flush_reports_what_is_durable(served: Served, shown: Any) -> None:
    status, flushed = shown("flush", "--json")
    assert status == Exit.OK
    assert flushed == {"flushed": 13, "not_admitted": 0, "pending": 0}


def test_drain_makes_the_warehouse_refuse_stores(served: Served, shown: Any) -> None:
    assert shown("drain")[0] == Exit.OK
    assert served.core.draining


def test_drain_is_undone_by_its_option(served: Served, shown: Any) -> None:
    shown("drain")
    assert shown("drain", "--undo", "--json") == (Exit.OK, {"undone": True})
    assert not served.core.draining
    assert shown("drain", "--undo") == (Exit.OK, "it did not drain\n")


def test_check_exits_with_4_and_names_what_is_damaged(served: Served, shown: Any) -> None:
    status, report = shown("check", "--json")
    assert status == Exit.FOUND
    assert report["checked"] == 13
    assert report["bad"] == [{"key": "00" * 16, "tier": "dram", "reason": "digest"}]
    assert report["tiers"]["dram"]["damaged"] == 1
    assert "--repair" in shown("check", "alpha")[1]


def test_check_with_repair_quarantines(served: Served, shown: Any) -> None:
    _, report = shown("check", "--repair", "--json")
    assert report["quarantined"] == 1


@pytest.mark.parametrize("repair", [False, True])
def test_check_that_ends_early_shows_what_it_has_found(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    repair: bool,
) -> None:
    """Incident: hours of a check, its damaged pages among them, were lost with its connection."""
    read = served.core.check

    def read_once(ordinal: int, after: int, limit: int, repair: bool) -> dict[str, Any]:
        if after:
            raise TransportError("the daemon is gone", code="deadline")
        return {**read(ordinal, after, limit, repair), "next": 1}

    monkeypatch.setattr(served.core, "check", read_once)
    asked = ["check", *(["--repair"] if repair else [])]
    assert main([*asked, "--json"]) == Exit.NO_DAEMON
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert (report["done"], report["checked"], report["damaged"]) == (False, 13, 1)
    assert report["quarantined"] == int(repair)
    assert "the check ended early, after 13 copies of pages, 1 damaged: " in shown.err
    assert main(asked) == Exit.NO_DAEMON
    assert f"{bytes(16).hex()}" in capsys.readouterr().out


def test_check_that_began_nowhere_shows_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> dict[str, Any]:
        raise TransportError("the daemon is gone", code="deadline")

    monkeypatch.setattr(served.core, "check", refuse)
    assert main(["check", "--json"]) == Exit.NO_DAEMON
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "ended early" not in shown.err


@pytest.mark.parametrize(
    ("arguments", "environ", "address"),
    [
        (["--address", "h:1"], {"KVW_ADDRESS": "x:2"}, "h:1"),
        (["--socket", "/s"], {"KVW_ADDRESS": "x:2"}, "unix:///s"),
        ([], {"KVW_ADDRESS": "x:2", "KVW_SOCKET": "/s"}, "x:2"),
        ([], {"KVW_SOCKET": "/s"}, "unix:///s"),
    ],
)
def test_address_is_the_flag_then_the_environment(
    arguments: list[str], environ: dict[str, str], address: str
) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_connection(parser)
    assert address_from(parser.parse_args(arguments), environ) == address


def test_default_address_is_the_daemons_own_default() -> None:
    import argparse

    from kvwarehouse import config

    parser = argparse.ArgumentParser()
    add_connection(parser)
    for environ in ({}, {"KVW_NAME": "second"}, {"XDG_RUNTIME_DIR": "/tmp"}):
        daemon = config.load({"dram": "64MiB"}, environ=environ).socket
        assert address_from(parser.parse_args([]), environ) == f"unix://{daemon}"
        daemon = config.load({"dram": "64MiB", "name": "third"}, environ=environ).socket
        assert address_from(parser.parse_args(["--name", "third"]), environ) == f"unix://{daemon}"
