"""examples/cupy_pages.py on a GPU, as its reader starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "cupy_pages.py"


@pytest.mark.usefixtures("cupy_device")
def test_conversation_computes_each_page_once() -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("turn")]
    assert said == [
        f"turn {number}: {16 * number} pages, {16 * (number - 1)} reused, right: True"
        for number in (1, 2, 3, 4)
    ]
