"""What `kvwarehouse doctor gpu` says of machines of all kinds."""

from __future__ import annotations

import json

import pytest

from kvwarehouse.gpu import Choice, LoadPath, Machine, Rates
from kvwarehouse.host import Verdict
from kvwarehouse_connectors.doctor import command
from kvwarehouse_connectors.doctor.gpu import findings_of

NONE = Machine(driver_error="OSError: no libcuda")
PLAIN = Machine(cuda="13.0", devices=["H100"], kvikio_error="ModuleNotFoundError: kvikio")
COMPAT = Machine(cuda="13.0", devices=["H100"], kvikio="26.10", problem="in the step 'gds' ...")
GDS = Machine(cuda="13.0", devices=["H100"], kvikio="26.10", gds=True)
OK, WARN, SKIP = Verdict.OK, Verdict.WARN, Verdict.SKIP


@pytest.mark.parametrize(
    ("machine", "verdicts"),
    [
        (NONE, [SKIP, SKIP, SKIP, SKIP]),
        (PLAIN, [OK, WARN, WARN, SKIP]),
        (COMPAT, [OK, OK, WARN, SKIP]),
        (GDS, [OK, OK, OK, SKIP]),
    ],
)
def test_a_fallback_is_a_warning_and_never_a_failure(
    machine: Machine, verdicts: list[Verdict]
) -> None:
    found = findings_of(machine, None)
    assert [finding.verdict for finding in found] == verdicts
    assert all(finding.fix for finding in found if finding.verdict is WARN)


def test_what_was_measured_is_said_with_the_way_that_was_chosen() -> None:
    rates = Rates({LoadPath.GDS: 6e9, LoadPath.DRAM: 5e9}, {LoadPath.COMPAT: "no buffers"}, 1)
    finding = findings_of(GDS, Choice(LoadPath.GDS, "the fastest that was measured", GDS, rates))[
        -1
    ]
    for words in ("gds: 6.00 GB/s", "no buffers", "NVMe to GPU by gds"):
        assert words in finding.what


def test_the_command_answers_on_any_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["gpu", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["engine"] == "gpu"
    names = ["driver", "kvikio", "GPUDirect Storage", "NVMe to GPU"]
    assert [check["check"] for check in answer["checks"]] == names
