"""The command around the doctor's judgement: arguments, the engine's process, what is printed."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

import kvwarehouse_connectors.doctor.look as look
from kvwarehouse.host import Verdict, fail, ok, warn
from kvwarehouse_bench.harness.eventually import longer_bounds
from kvwarehouse_connectors.doctor import command
from kvwarehouse_connectors.doctor.engine_process import engine_facts, probe
from kvwarehouse_connectors.doctor.engines import ENGINES, engine_of
from kvwarehouse_connectors.doctor.facts import DaemonFacts, EngineFacts, Facts
from kvwarehouse_connectors.doctor.packages import software_facts, unmet_requirements
from kvwarehouse_connectors.doctor.show import print_json, print_table

FINDINGS = [
    ok("address", "unix:///run/kvw.sock"),
    warn("device", "cuda [bold]H100[/bold]", "compare answers"),
    fail("socket", "nothing there", "start `kvwarehouse serve`"),
]


def process(*lines: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(lines)]


def facts_of(*lines: str, timeout_s: float = 60.0) -> EngineFacts:
    return engine_facts(process(*lines), timeout_s)


def test_command_is_an_entry_point_of_the_command_line() -> None:
    (point,) = metadata.entry_points(group="kvwarehouse.commands", name="doctor")
    assert point.load() is command


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for word in (*ENGINES, "--config", "examples:", "verdicts:", "exit status:", "--address"):
        assert word in told


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dynamo"],
        ["vllm", "--timeout", "soon"],
        ["vllm", "--timeout", "inf"],
        ["gpu", "--timeout", "nan"],
        ["sglang", "--page-tokens", "0"],
        ["sglang", "--page-tokens", "many"],
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_facts_of_the_engine_are_read_line_by_line_past_what_imports_print() -> None:
    facts = facts_of(
        'print(\'{"step": "torch"}\')',
        "print('INFO 10:00 some library greets')",
        'print(\'{"torch": "2.13", "unheard_of": 1}\')',
        'print(\'{"version": "0.32.0"}\')',
        "print('{\"devi', end='')",
    )
    assert facts == EngineFacts(torch="2.13", version="0.32.0")


def test_crash_of_the_engine_is_told_with_its_step_and_what_was_known_before() -> None:
    facts = facts_of(
        "import os, sys",
        'print(\'{"torch": "2.13"}\')',
        'print(\'{"step": "engine"}\', flush=True)',
        "print('illegal instruction', file=sys.stderr, flush=True)",
        "os.abort()",
    )
    assert facts.torch == "2.13"
    assert "'engine'" in facts.crash
    assert "illegal instruction" in facts.crash


def test_engine_that_hangs_is_given_up_with_what_was_known_before() -> None:
    for bound_s in longer_bounds(0.25):
        facts = facts_of(
            'print(\'{"step": "torch"}\\n{"torch": "2.13"}\', flush=True)',
            "import threading; threading.Event().wait()",
            timeout_s=bound_s,
        )
        assert f"{bound_s:g} s" in facts.crash
        if facts.torch:  # what it says first came within the bound
            break
    assert facts.torch == "2.13"
    assert "'torch'" in facts.crash


def test_json_is_one_object_with_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    print_json("vllm", FINDINGS)
    told = json.loads(capsys.readouterr().out)
    assert told["engine"] == "vllm"
    assert told["ok"] is False
    assert [check["verdict"] for check in told["checks"]] == ["ok", "warn", "fail"]
    assert told["checks"][2] == {
        "check": "socket",
        "verdict": "fail",
        "what": "nothing there",
        "fix": "start `kvwarehouse serve`",
    }


def test_table_has_every_finding_and_fix_and_reads_no_markup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table("vllm", FINDINGS)
    told = capsys.readouterr().out
    for one in FINDINGS:
        for text in (one.check, one.verdict, one.what, one.fix):
            assert text in told
    assert "1 ok, 1 warn, 1 fail" in told


def test_requirements_of_this_environment_are_met() -> None:
    pytest.importorskip("packaging", reason="an engine's environment has it, this one does not")
    assert unmet_requirements("kvwarehouse") == ()


def test_requirement_that_is_not_met_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("packaging", reason="an engine's environment has it, this one does not")
    info = tmp_path / "needy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: needy\nVersion: 1.0\n"
        "Requires-Dist: numpy>=99\nRequires-Dist: numpy>=1\n"
        "Requires-Dist: kvw-absent>=2\nRequires-Dist: kvw-extra>=2; extra == 'more'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    too_old, missing = unmet_requirements("needy")
    assert too_old.startswith("numpy>=99 (found: ")
    assert missing == "kvw-absent>=2 (found: none)"


def test_software_names_what_brings_a_module_and_the_plugins_of_a_group() -> None:
    facts = software_facts("numpy", "kvwarehouse.commands")
    assert facts.engine_distributions == ("numpy",)
    assert ("doctor", "kvwarehouse_connectors.doctor:command") in facts.plugins
    assert facts.versions["kvwarehouse"] == metadata.version("kvwarehouse")
    assert software_facts("kvw_no_such_module", "x").engine_distributions == ()


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(("facts", "status"), [(Facts(), 1), ("healthy", 0)])
def test_exit_status_is_1_when_something_fails(
    facts: Facts | str,
    status: int,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(look, "look", lambda engine, asked: facts)
    if facts == "healthy":
        monkeypatch.setattr(engine_of(name), "findings_of", lambda facts: [ok("all", "well")])
    assert command([name, "--json"]) == status
    told = json.loads(capsys.readouterr().out)
    assert (told["engine"], told["ok"]) == (name, status == 0)
    verdicts = {check["verdict"] for check in told["checks"]}
    assert (Verdict.FAIL in verdicts) == (status == 1)


@pytest.mark.parametrize("name", ENGINES)
def test_engine_that_is_not_installed_is_told_from_one_that_is(name: str) -> None:
    """The real probe, here where none of them is."""
    served = engine_of(name).SERVED
    if software_facts(served.module, "").engine_distributions:
        pytest.skip(f"{served.title} is installed here; its own environment's tests look at it")
    facts = engine_facts(probe(name), 120.0)
    assert (facts.version, facts.crash) == ("", "")
    assert served.module in facts.engine_error
    assert facts.connector_error


@pytest.mark.parametrize("name", ENGINES)
def test_documentation_that_the_doctor_names_has_the_engines_option(name: str) -> None:
    served = engine_of(name).SERVED
    text = (Path(__file__).parents[2] / served.page).read_text(encoding="utf-8")
    assert served.config_option in text
    assert f"kvwarehouse doctor {name}" in text
    assert f"pip install '{served.install}'" in text or f"pip install {served.install}" in text


def test_doctor_reads_the_daemon_that_the_configuration_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVW_ADDRESS", "unix:///run/another.sock")
    monkeypatch.setattr(look, "engine_facts", lambda command, timeout_s: EngineFacts())
    monkeypatch.setattr(look, "daemon_facts", lambda address: DaemonFacts(address=address))
    file = tmp_path / "extra.json"
    file.write_text('{"kvwarehouse.address": "unix:///run/mine.sock"}')

    def address(**given: str) -> str:
        return look.look("sglang", look.Asked(**given)).daemon.address  # type: ignore[arg-type]

    assert address(config=f"@{file}") == "unix:///run/mine.sock"
    assert address() == "unix:///run/another.sock"
    assert address(config=f"@{file}", address="unix:///run/given.sock") == "unix:///run/given.sock"
    assert address(config='{"kvwarehouse.adress": "x"}') == "unix:///run/another.sock"
