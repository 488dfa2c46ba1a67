"""What names a namespace: digests of what its pages depend on, names for people, and fingerprints
of weights, whose files are looked for on this machine.

Stateless. checkpoint_fingerprint reads the files (their headers and samples: seconds for large
models), so it does not belong on a thread that anybody waits for.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import kvwarehouse as kvw


def digest_of(values: Any) -> str:
    """Of plain values, in any order of their names."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def short_name(model: str) -> str:
    """A name for people; what tells models apart stands beside it."""
    name = Path(model).name or model
    return "".join(c for c in name if c.isprintable())[:200] or "model"


def checkpoint_fingerprint(
    model: str, revision: str | None, cache_dir: str | None, where: str
) -> str:
    """model: a path, or a name on the hub of which there is a local snapshot. where: what the
    engine calls the configuration in which kvwarehouse.weights may be set, for messages. Raises
    UsageError (code "no_weights") where there are no files to read."""
    return kvw.fingerprint(local_checkpoint(model, revision, cache_dir, where))


def no_weights(problem: str, where: str) -> kvw.UsageError:
    return kvw.UsageError(
        f"kvwarehouse cannot fingerprint the weights: {problem}. Set kvwarehouse.weights in {where}"
        " to a name that changes whenever they do",
        code="no_weights",
    )


def local_checkpoint(model: str, revision: str | None, cache_dir: str | None, where: str) -> str:
    """The path of its files: `model` itself, or the hub's local snapshot of it. Arguments and
    errors as of checkpoint_fingerprint()."""
    if os.path.exists(model):
        return model
    try:
        from huggingface_hub import snapshot_download

        return str(
            snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True)
        )
    except Exception as error:  # whatever the hub client raises
        raise no_weights(
            f"{model} is not a path, and no local snapshot of it: {error}", where
        ) from error
