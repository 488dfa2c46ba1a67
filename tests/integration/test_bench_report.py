"""`bench/warehouse.py`: what it makes of results that are there, as a program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse_bench.micro.figures import Curve, Figure, Result, write_result

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "warehouse.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_report_is_made_of_the_results_that_are_there(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="the pictures' library is not installed: make setup-bench")
    found = [
        Figure("a load", 5, "GB/s", 10, "copy", "ratio 0.75 or more"),
        Curve("cost by pages", "lookup", "pages", "ns a page", ((1, 10.0), (100, 4.0))),
    ]
    write_result(Result("load", {"machine": "m"}, found), tmp_path / "warehouse")
    ran = run("--report", "--out", str(tmp_path))
    assert ran.returncode == Exit.OK, ran.stderr
    assert "0 of 1 goals met, 1 missed." in ran.stdout
    [result] = json.loads((tmp_path / "warehouse.json").read_text())["results"]
    assert result["figures"][0]["verdict"] == "missed"
    assert "a load" in (tmp_path / "warehouse.html").read_text()
    picture = (tmp_path / "warehouse_cost_by_pages.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


def test_report_of_nothing_says_what_to_do(tmp_path: Path) -> None:
    ran = run("--report", "--out", str(tmp_path))
    assert ran.returncode == Exit.USAGE
    assert "run a measure" in ran.stderr


def test_measure_that_there_is_not_is_refused_before_any_runs(tmp_path: Path) -> None:
    ran = run("load", "speed", "--out", str(tmp_path))
    assert ran.returncode == Exit.USAGE
    assert "speed" in ran.stderr
