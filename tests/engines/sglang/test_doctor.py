"""`kvwarehouse doctor sglang` in an environment with SGLang's real package."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import kvwarehouse_connectors.doctor.look as look
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.doctor import command
from kvwarehouse_connectors.doctor.engine_process import probe
from kvwarehouse_connectors.doctor.sglang import RUN

RIG = Path(__file__).parents[2] / "support"
EXTRA = {
    "backend_name": "kvwarehouse",
    "module_path": "kvwarehouse_connectors.sglang",
    "class_name": "WarehouseStorage",
    "interface_v1": 1,
}


def with_absent_parts(engine: str, arguments: Sequence[str] = ()) -> list[str]:
    """The doctor's own process, where SGLang can be imported without a GPU's packages. Without
    arguments of an engine's command line."""
    assert not arguments
    lines = (
        f"import sys; sys.path.insert(0, {str(RIG)!r})",
        "import sglang_rig.absent",
        "from kvwarehouse_connectors.doctor.probe import main",
        f"main({engine!r})",
    )
    assert probe(engine)[-3:] == ["-m", "kvwarehouse_connectors.doctor.probe", engine]
    return [sys.executable, "-c", "\n".join(lines)]


@pytest.fixture
def extra(serving: Serving, tmp_path: Path) -> str:
    file = tmp_path / "extra.yaml"  # JSON is YAML, and this is read by the real package for it
    file.write_text(json.dumps({**EXTRA, "kvwarehouse.address": serving.address}))
    return f"@{file}"


def test_doctor_finds_nothing_wrong_but_that_there_is_no_gpu(
    extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(look, "probe", with_absent_parts)
    status = command(["sglang", "--json", "--config", extra, "--model", "llama-3.3-70b"])
    told = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert status == 1
    assert {name: check["verdict"] for name, check in told.items() if check["verdict"] != "ok"} == {
        "device": "fail",  # HiCache needs one
        "DRAM tier": "warn",  # 64 MiB
    }
    assert told["sglang"]["what"].startswith(".".join(map(str, RUN)))
    assert "takes the connector" in told["factory"]["what"]


def test_doctor_finds_what_this_environment_lacks_for_a_server(
    extra: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same without what stands in here for packages that need a GPU."""
    assert command(["sglang", "--json", "--config", extra]) == 1
    told = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert told["sglang"]["verdict"] == "fail"
    assert "triton" in told["sglang"]["what"]
    assert told["connector"]["verdict"] == "skip"
