"""What the README and the page on the Python client show runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [
    example
    for page in ("README.md", "docs/python.md")
    for example in re.findall(
        r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL
    )
]


def test_documents_have_an_example_of_each_client() -> None:
    assert ["kvw.aio" in example for example in EXAMPLES] == [False, False, True]


@pytest.mark.parametrize("example", EXAMPLES, ids=["readme", "blocking", "asyncio"])
def test_python_of_the_documents_runs_as_it_is_written(tmp_path: Path, example: str) -> None:
    script = tmp_path / "readme.py"
    script.write_text(example, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "stored=10" in ran.stdout


@pytest.mark.parametrize("command", ["serve", "status", "bench", "demo"])
def test_commands_of_the_readme_exist(command: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kvwarehouse", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert re.search(rf"^  {command}\b", ran.stdout, re.MULTILINE)
