"""The facts of a driver (bench/gpu_facts.py), asked of the contract model: each is told, and asking
keeps to the contract. Its figures mean nothing here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "gpu_facts.py"


def ask(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    # -S: it has the standard library alone.
    command = [sys.executable, "-S", str(PROGRAM), "--quick", "--dir", str(folder)]
    given = os.environ | environment
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)


def test_every_fact_is_told_and_the_contract_is_kept(cuda_driver: Path, tmp_path: Path) -> None:
    asked = ask(tmp_path)
    lines = asked.stdout.splitlines()
    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert asked.stderr == ""  # the model says there what breaks its contract
    assert [line for line in lines if not line.startswith("FACT ") or "FAILED" in line] == []
    for begin, count in {
        "driver 13000 context": 1,
        "attribute": 15,
        "granularity": 2,
        "exported fd": 1,
        "cuMemSetAccess": 2,
        "register 4 MiB,": 3,
        "MADV_COLLAPSE": 1,
        "cuMemAlloc 16 MiB": 1,
        "cuEventQuery": 1,
        "cuMemHostAlloc 16 MiB": 1,
        "('pointer attributes without a context', 0, 2, 0, 0)": 1,
        "cuMemcpyHtoDAsync_v2": 8,
        "cuMemcpyDtoHAsync_v2": 8,
        "cuMemcpyBatchAsync_v2 to the device, ": 7,
        "cuMemcpyBatchAsync_v2 to the host, ": 7,
    }.items():
        assert sum(line.startswith(f"FACT {begin}") for line in lines) == count, begin
    speeds = [line for line in lines if "cuMemcpy" in line]
    assert all(line.count(" GB/s (queueing ") == 2 for line in speeds)


def test_facts_go_on_and_the_status_is_1_when_a_part_fails(
    cuda_driver: Path, tmp_path: Path
) -> None:
    asked = ask(tmp_path, KVW_TEST_CUDA_ALLOC_LIMIT="1")
    failed = [line.split()[1] for line in asked.stdout.splitlines() if " FAILED " in line]
    assert (asked.returncode, failed) == (1, ["calls", "contexts", "copies", "batches"])
    assert "FACT granularity minimum" in asked.stdout
    assert "FACT copies FAILED CudaDriverError cuMemAlloc_v2 -> 2" in asked.stdout


def test_batch_that_the_driver_refuses_is_told_beside_single_copies(
    cuda_driver: Path, tmp_path: Path
) -> None:
    asked = ask(tmp_path, KVW_TEST_CUDA_BATCH_RESULT="801")
    assert asked.returncode == 0
    assert asked.stdout.count(", 64 a call: error 801; one by one ") == 14


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"KVW_CUDA_DRIVER": "/nowhere/libcuda.so.1"}, "no CUDA driver: /nowhere/libcuda.so.1: "),
        ({"KVW_TEST_CUDA_DEVICES": "0"}, "cuInit -> 100"),
    ],
    ids=["driver", "device"],
)
def test_facts_are_skipped_with_a_reason_without_one(
    cuda_driver: Path, tmp_path: Path, environment: dict[str, str], why: str
) -> None:
    asked = ask(tmp_path, **environment)
    assert (asked.returncode, asked.stdout) == (77, "")
    assert asked.stderr.startswith(f"gpu facts: no GPU here: {why}")
