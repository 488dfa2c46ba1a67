"""The files of a LoRA adapter: those that vLLM reads, found where vLLM finds them.

Stateless. Blocks for the file system, so not on a thread that anybody waits for.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import kvwarehouse as kvw

_CONFIG = "adapter_config.json"
# vLLM takes the first that is there.
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_MOST_CONFIG_BYTES = 1 << 20

Signature = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class AdapterFiles:
    """from_hub: the path is a name of the hub, and the folder its local snapshot. signature: equal
    while the files are the same."""

    folder: Path
    from_hub: bool
    signature: Signature


def find_files(path: str) -> AdapterFiles | None:
    """path: as a LoRARequest has it; vLLM's get_adapter_absolute_path() goes the same way, but
    downloads. None where nothing here has that name. Raises OSError."""
    if os.path.isabs(path) or path.startswith("~") or os.path.exists(path):
        folder = Path(os.path.abspath(os.path.expanduser(path)))
        return AdapterFiles(folder, False, _signature(folder))
    snapshot = _snapshot(path)
    return AdapterFiles(snapshot, True, _signature(snapshot)) if snapshot is not None else None


def files_digest(files: AdapterFiles) -> bytes:
    """32 bytes, the same wherever the files lie. Reads every byte: adapters are small, and are
    edited in place. Raises OSError or UsageError where they are not there, or damaged."""
    there = [name for name, *_ in files.signature]
    weights = next((name for name in _WEIGHTS if name in there), _WEIGHTS[0])
    with (files.folder / _CONFIG).open("rb") as opened:
        config = opened.read(_MOST_CONFIG_BYTES + 1)
    if len(config) > _MOST_CONFIG_BYTES:
        raise kvw.UsageError(
            f"{files.folder / _CONFIG} is over {_MOST_CONFIG_BYTES} bytes", code="bad_fingerprint"
        )
    state = hashlib.blake2b(kvw.fingerprint(files.folder / weights, full=True).encode())
    state.update(config)
    return hashlib.blake2b(state.digest(), digest_size=32, person=b"kvw adapter").digest()


def _snapshot(name: str) -> Path | None:
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return None  # vLLM then asks another hub, whose snapshots are elsewhere
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # noqa: BLE001 - whatever the hub client raises: there is none
        return None


def _signature(folder: Path) -> Signature:
    found = []
    for name in (_CONFIG, *_WEIGHTS):
        try:
            facts = os.stat(folder / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        found.append((name, facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return tuple(found)
