"""examples/cupy_pages.py where there is no GPU: what it does with pages, by NumPy's arrays in host
memory, and what it says. tests/gpu runs it over CuPy's."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvwarehouse_bench.harness.serving import Serving

PROGRAM = Path(__file__).parents[2] / "examples" / "cupy_pages.py"


def test_conversation_computes_each_page_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Serving(tmp_path, dram="128MiB") as serving, serving.connect(timeout_s=60) as client:
        runpy.run_path(str(PROGRAM))["converse"](np, client)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("turn")]
    assert said == [
        f"turn {number}: {16 * number} pages, {16 * (number - 1)} reused, right: True"
        for number in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (None, "needs CuPy, pip install 'kvwarehouse[gpu]'"),
        ("class cuda:\n    is_available = staticmethod(lambda: False)\n", "needs a GPU"),
    ],
)
def test_without_a_gpu_it_says_what_it_needs_and_ends(
    tmp_path: Path, module: str | None, words: str
) -> None:
    """Whatever this machine has: the CuPy that it finds is the test's."""
    (tmp_path / "cupy.py").write_text(module or "raise ImportError('not here')\n")
    done = subprocess.run(
        [sys.executable, "-c", f"import runpy; runpy.run_path({str(PROGRAM)!r}, None, '__main__')"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
