"""Files of --fleet-secret."""

from __future__ import annotations

from pathlib import Path


def secret_file(folder: Path, name: str = "fleet-secret", data: bytes = bytes(32)) -> str:
    """Its path. Daemons that have it make the same keys in every run, also where a test depends on
    which of them meet in a small table."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_bytes(data)
    file.chmod(0o600)
    return str(file)
