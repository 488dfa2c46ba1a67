"""Where the files of a model's weights lie on this machine, and their fingerprint.

Stateless. Reads the files (their headers and samples: seconds for large models), so not on a thread
that anybody waits for.
"""

from __future__ import annotations

import os

import kvwarehouse as kvw


def checkpoint_fingerprint(
    model: str, revision: str | None, cache_dir: str | None, where: str
) -> str:
    """model: a path, or a name on the hub of which there is a local snapshot. where: what the
    engine calls the configuration in which kvwarehouse.weights may be set, for messages. Raises
    UsageError (code "no_weights") where there are no files to read."""
    return kvw.fingerprint(_local(model, revision, cache_dir, where))


def no_weights(problem: str, where: str) -> kvw.UsageError:
    return kvw.UsageError(
        f"kvwarehouse cannot fingerprint the weights: {problem}. Set kvwarehouse.weights in {where}"
        " to a name that changes whenever they do",
        code="no_weights",
    )


def _local(model: str, revision: str | None, cache_dir: str | None, where: str) -> str:
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
