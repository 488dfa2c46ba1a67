"""What a fingerprint must tell apart, and what it must not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from kvwarehouse import errors
from kvwarehouse.fingerprint import fingerprint

TENSOR_BYTES = 1 << 20


def write_safetensors(path: Path, tensors: dict[str, bytes]) -> int:
    """Writes the file; returns the offset of its data."""
    header: dict[str, object] = {}
    offset = 0
    for name, data in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))
    return 8 + len(text)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 2}')
    tensors = {f"layer.{n}": bytes([n + 1]) * TENSOR_BYTES for n in range(3)}
    write_safetensors(folder / "model.safetensors", {**tensors, "norm": b"\x01" * 64})
    return folder


def change_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 0xFF]))


@pytest.mark.parametrize("full", [False, True])
def test_fingerprint_is_equal_at_another_path(checkpoint: Path, tmp_path: Path, full: bool) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "elsewhere" / "copy")
    assert fingerprint(checkpoint, full=full) == fingerprint(str(copy), full=full)


def test_fingerprint_is_equal_through_the_links_of_a_hub_cache(
    checkpoint: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in checkpoint.iterdir():
        blob = tmp_path / f"blob-{file.name}"
        shutil.copy(file, blob)
        os.symlink(blob, snapshot / file.name)
    assert fingerprint(snapshot) == fingerprint(checkpoint)


@pytest.mark.parametrize("tensor", [0, 1, 2])
@pytest.mark.parametrize("place", [0, TENSOR_BYTES - 1])
def test_fingerprint_differs_when_a_tensor_differs_at_the_same_path(
    checkpoint: Path, tensor: int, place: int
) -> None:
    before = fingerprint(checkpoint)
    file = checkpoint / "model.safetensors"
    data_offset = file.stat().st_size - 3 * TENSOR_BYTES - 64
    change_byte(file, data_offset + tensor * TENSOR_BYTES + place)
    assert fingerprint(checkpoint) != before


def test_fingerprint_differs_when_any_byte_of_a_small_tensor_differs(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    seen = {fingerprint(checkpoint)}
    for place in range(1, 65, 9):
        change_byte(file, file.stat().st_size - place)
        seen.add(fingerprint(checkpoint))
    assert len(seen) == 9


def test_full_fingerprint_sees_one_byte_that_samples_miss(checkpoint: Path) -> None:
    sampled, full = fingerprint(checkpoint), fingerprint(checkpoint, full=True)
    file = checkpoint / "model.safetensors"
    change_byte(file, file.stat().st_size - 64 - TENSOR_BYTES + 5000)
    assert fingerprint(checkpoint) == sampled, "the documented residual risk; update the docstring"
    assert fingerprint(checkpoint, full=True) != full


def test_fingerprint_differs_when_tensors_swap_names(tmp_path: Path) -> None:
    one, two = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    write_safetensors(one, {"a": b"x" * 64, "b": b"y" * 64})
    write_safetensors(two, {"b": b"x" * 64, "a": b"y" * 64})
    assert fingerprint(one) != fingerprint(two)


def test_fingerprint_differs_when_the_config_differs(checkpoint: Path) -> None:
    before = fingerprint(checkpoint)
    (checkpoint / "config.json").write_text('{"layers": 3}')
    assert fingerprint(checkpoint) != before


def test_fingerprint_differs_when_an_opaque_file_differs(tmp_path: Path) -> None:
    folder = tmp_path / "opaque"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"\x05" * (9 << 20))
    before = fingerprint(folder)
    change_byte(folder / "pytorch_model.bin", (9 << 20) - 1)
    assert fingerprint(folder) != before


def test_fingerprint_ignores_hidden_files(checkpoint: Path) -> None:
    before = fingerprint(checkpoint)
    (checkpoint / ".cache").mkdir()
    (checkpoint / ".cache" / "download.lock").write_text("1")
    (checkpoint / ".gitattributes").write_text("x")
    assert fingerprint(checkpoint) == before


def test_fingerprint_ends_when_a_link_leads_back_to_the_directory(checkpoint: Path) -> None:
    before = fingerprint(checkpoint)
    os.symlink(checkpoint, checkpoint / "again")
    assert fingerprint(checkpoint) == before


def test_fingerprints_of_text_samples_and_all_never_meet(checkpoint: Path) -> None:
    kinds = [fingerprint("model"), fingerprint(checkpoint), fingerprint(checkpoint, full=True)]
    assert [kind.split(":")[1] for kind in kinds] == ["text", "sampled", "full"]
    assert fingerprint("model") == fingerprint("model") != fingerprint("model2")


@pytest.mark.parametrize("text", ["org/model", "org/model@main", "seed-7"])
def test_fingerprint_takes_a_name_that_is_no_path_as_text(text: str) -> None:
    assert fingerprint(text).startswith("kvw1:text:")


@pytest.mark.parametrize("given", ["/no/such", "./no", "../no", "no.safetensors", Path("no"), ""])
def test_fingerprint_refuses_a_path_that_is_not_there(given: str | Path) -> None:
    with pytest.raises(errors.UsageError, match="fingerprint: "):
        fingerprint(given)


def test_fingerprint_refuses_a_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(errors.UsageError, match="holds no weights"):
        fingerprint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\n",
        (2**63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (3).to_bytes(8, "little") + b"\xff\xfe{",
        (42).to_bytes(8, "little") + b'{"a":{"data_offsets":[0,9999999999999999]}}'[:42],
        (34).to_bytes(8, "little") + b'{"a":{"data_offsets":[0,99999999]}}'[:34],
        (30).to_bytes(8, "little") + b'{"a":{"data_offsets":[-1,0] }}',
    ],
)
def test_fingerprint_refuses_a_damaged_safetensors_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(errors.UsageError, match="is damaged"):
        fingerprint(path)


def test_fingerprint_refuses_a_broken_link(checkpoint: Path) -> None:
    os.symlink("/no/such/blob", checkpoint / "more.safetensors")
    with pytest.raises(errors.UsageError, match="cannot be read"):
        fingerprint(checkpoint)


def test_fingerprint_has_not_drifted(tmp_path: Path) -> None:
    """Old fingerprints are in ledgers: another value here is a new version of the format."""
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"w": bytes(range(256)) * 1024})
    assert fingerprint(path) == "kvw1:sampled:3be4f309a1b8e060c279043273980dc6"
    assert fingerprint("model") == "kvw1:text:6b6b1f9fd571abd424ae72ec76e643a1"
