"""The kernels, by NVIDIA's own compilers, which need no GPU, and those kept for later processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvwarehouse.client.gpu import kernel_cache, kernels

CUDA_13_0, CUDA_12_9 = "nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
"""Where packages have it. torch 2.11 pins that of 13.0, which does not find its own builtins."""
COMPILE = """
import pathlib, sys
from kvwarehouse.client.gpu import kernel_cache, kernels
kernels.SOURCE = pathlib.Path(sys.argv[2])
kernels._candidates = lambda driver_major: iter(sys.argv[3:])
sys.stdout.buffer.write(kernels.compiled(*divmod(int(sys.argv[1]), 10)))
"""


def compiled_alone(
    architecture: int, *libraries: Path, cache: Path, source: Path = kernels.SOURCE
) -> bytes:
    """In a process of its own: what one loaded, another finds."""
    environ = {name: value for name, value in os.environ.items() if name != "KVW_NVRTC"}
    environ["XDG_CACHE_HOME"] = str(cache)
    paths = map(str, [source, *libraries])
    command = [sys.executable, "-c", COMPILE, str(architecture), *paths]
    return subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE).stdout


def installed(library: str) -> Path:
    for folder in sys.path:
        if (found := Path(folder) / library).exists():
            return found
    pytest.skip(f"needs {library}: install the project's test environment")


@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("library", [CUDA_12_9, CUDA_13_0], ids=["12.9", "13.0"])
def test_kernels_compile_for_the_devices_that_there_are(
    library: str, architecture: int, tmp_path: Path
) -> None:
    cubin = compiled_alone(architecture, installed(library), cache=tmp_path)
    assert cubin.startswith(b"\x7fELF")
    assert b"kvw_gather" in cubin
    assert b"kvw_scatter" in cubin


def test_devices_newer_than_the_compiler_get_ptx_of_the_newest_it_knows(tmp_path: Path) -> None:
    ptx = compiled_alone(150, installed(CUDA_12_9), cache=tmp_path)
    assert b".target sm_121" in ptx
    assert b".entry kvw_gather" in ptx
    assert b".entry kvw_scatter" in ptx
    assert ptx.endswith(b"\0")


def test_compiler_that_lacks_its_builtins_makes_room_for_the_next(tmp_path: Path) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.symlink_to(installed(CUDA_13_0))
    both = compiled_alone(90, broken, installed(CUDA_12_9), cache=tmp_path)
    assert both.startswith(b"\x7fELF")
    with pytest.raises(subprocess.CalledProcessError):
        compiled_alone(90, broken, cache=tmp_path)


# --- compiled kernels that outlive their process

ANOTHER = b"an image that no compiler makes"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A kernel in place of ours, which take a second."""
    source = tmp_path / "small.cu"
    source.write_text('extern "C" __global__ void kernel(int* to) { *to = 1; }')
    return source


def cached_kernels(cache: Path) -> Path:
    (file,) = (cache / "kvwarehouse" / "kernels").iterdir()
    return file


def test_kernels_are_compiled_by_the_first_process_alone(tmp_path: Path, small: Path) -> None:
    nvrtc = installed(CUDA_12_9)
    image = compiled_alone(90, nvrtc, cache=tmp_path, source=small)
    file = cached_kernels(tmp_path)
    assert file.read_bytes().endswith(image)
    kernel_cache.write_image(file, ANOTHER)
    assert compiled_alone(90, nvrtc, cache=tmp_path, source=small) == ANOTHER
    assert compiled_alone(80, nvrtc, cache=tmp_path, source=small) != ANOTHER


def damage(file: Path) -> None:
    stored = bytearray(file.read_bytes())
    stored[-1] ^= 1
    file.write_bytes(stored)


def open_to_all(file: Path) -> None:
    kernel_cache.write_image(file, ANOTHER)
    file.chmod(0o666)


def cut(file: Path) -> None:
    os.truncate(file, 40)


@pytest.mark.parametrize("spoil", [damage, open_to_all, cut])
def test_kernels_that_cannot_be_believed_are_compiled_anew(
    tmp_path: Path, small: Path, spoil: Callable[[Path], None]
) -> None:
    nvrtc = installed(CUDA_12_9)
    image = compiled_alone(90, nvrtc, cache=tmp_path, source=small)
    good = cached_kernels(tmp_path).read_bytes()
    spoil(cached_kernels(tmp_path))
    assert compiled_alone(90, nvrtc, cache=tmp_path, source=small) == image
    assert cached_kernels(tmp_path).read_bytes() == good
    assert cached_kernels(tmp_path).stat().st_mode & 0o777 == 0o600


def test_kernels_are_compiled_where_nothing_can_be_kept(tmp_path: Path, small: Path) -> None:
    (tmp_path / "kvwarehouse").write_bytes(b"no folder")
    image = compiled_alone(90, installed(CUDA_12_9), cache=tmp_path, source=small)
    assert image.startswith(b"\x7fELF")


def test_only_the_newest_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keys = [kernel_cache.key_of(b"", "sm_90", (12, minor)) for minor in range(40)]
    for age_s, key in enumerate(keys):
        kernel_cache.remember(key, key.encode())
        os.utime(tmp_path / "kvwarehouse" / "kernels" / key, (age_s, age_s))
    assert [kernel_cache.recall(key) for key in keys[:24]] == [None] * 24
    assert [kernel_cache.recall(key) for key in keys[24:]] == [key.encode() for key in keys[24:]]
