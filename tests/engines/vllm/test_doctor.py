"""`kvwarehouse doctor vllm` in vLLM's own environment, with the real package and a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.doctor.probe_vllm import CONNECTOR
from kvwarehouse_connectors.vllm.plugin import NAME


def doctor(*arguments: str, **environment: str) -> tuple[int, str]:
    """(exit status, stdout)"""
    ran = subprocess.run(
        [sys.executable, "-m", "kvwarehouse", "doctor", "vllm", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not ran.stderr, ran.stderr
    return ran.returncode, ran.stdout


def verdicts(told: str) -> dict[str, str]:
    checks: list[dict[str, Any]] = json.loads(told)["checks"]
    return {check["check"]: check["verdict"] for check in checks}


def config(address: str) -> str:
    transfer = {
        "kv_connector": "WarehouseConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvwarehouse.address": address},
    }
    return json.dumps(transfer)


def test_doctor_finds_nothing_wrong_with_this_environment_and_a_daemon(tmp_path: Path) -> None:
    with Serving(tmp_path, dram="64MiB") as serving:
        model = ("--model", "llama-3.3-70b", "--page-tokens", "16")  # more has no room here
        given = ("--config", config(serving.address), *model)
        status, told = doctor("--json", *given)
        found = verdicts(told)
        table_status, table = doctor(*given)
    assert (status, table_status) == (0, 0)
    assert {check: verdict for check, verdict in found.items() if verdict != "ok"} == {
        "DRAM tier": "warn",  # 64 MiB
        "vllm serve": "skip",  # no command line was given
        "store of a step": "skip",
    } | {check: "warn" for check in ("vllm command",) if found[check] == "warn"}
    assert "vllm can be served" in table
    assert all(check in table for check in found)


def test_doctor_finds_plugins_that_are_shut_out_and_a_daemon_that_is_not_there(
    tmp_path: Path,
) -> None:
    address = f"unix://{tmp_path / 'kvw.sock'}"
    status, told = doctor("--json", KVW_ADDRESS=address, VLLM_PLUGINS="another")
    found = verdicts(told)
    assert status == 1
    assert {check for check, verdict in found.items() if verdict == "fail"} == {"plugin", "socket"}
    assert found["connector"] == "ok"
    assert str(tmp_path) in told


def test_doctor_asks_for_the_name_under_which_the_plugin_registers() -> None:
    assert CONNECTOR == NAME


def test_doctor_reads_a_whole_command_line_as_vllm_and_the_connector_do(
    checkpoint: Path, tmp_path: Path
) -> None:
    with Serving(tmp_path, dram="64MiB") as serving:
        line = ("--", "vllm", "serve", str(checkpoint), "--kv-transfer-config")
        served, told = doctor("--json", *line, config(serving.address))
        refused, why = doctor("--json", *line, config(serving.address), "--load-format=dummy")
        odd, error = doctor("--json", *line, config(serving.address), "--no-such-option")
    assert served == 0
    assert verdicts(told)["vllm serve"] == "ok"
    assert "blocks of 128 tokens" in told
    assert (refused, verdicts(why)["vllm serve"]) == (1, "fail")
    assert "load_format is dummy" in why
    assert (odd, verdicts(error)["vllm serve"]) == (1, "fail")
    assert "--no-such-option" in error
