"""What tests of several files use, and what is made once a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwarehouse.testing import cuda_model


@pytest.fixture(scope="session")
def built_cuda_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One build for the run: a process chooses its driver once, so two would be two devices, and
    the memory of one no memory of the other."""
    return cuda_model.build(tmp_path_factory.mktemp("cuda_model"))


@pytest.fixture(scope="module")
def cuda_driver(built_cuda_model: Path) -> Iterator[Path]:
    """The model in the driver's place, for this process and those that it starts: its folder. No
    other file's daemons see it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cuda_model.environment(built_cuda_model).items():
            patch.setenv(name, value)
        yield built_cuda_model
