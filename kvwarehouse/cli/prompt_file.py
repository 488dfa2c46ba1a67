"""A prompt as commands are given it: a file of token ids, or of an engine's block hashes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvwarehouse.errors import UsageError

_MOST_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class PromptFile:
    """One of the two."""

    tokens: list[int] | None
    keys: list[bytes] | None


def add_prompt(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    parser.add_argument(
        "prompt",
        nargs="?" if optional else None,
        metavar="FILE",
        help="Token ids, as a JSON list or between spaces or commas; - reads standard input.",
    )
    parser.add_argument(
        "--keys",
        action="store_true",
        help="FILE has the engine's block hashes instead, in hex, one a page.",
    )


def prompt_from(args: argparse.Namespace) -> PromptFile:
    """Raises UsageError where the file cannot be read, or has something else."""
    words = _words(args.prompt)
    if args.keys:
        return PromptFile(
            None, [hex_bytes(word, f"the key at place {at}") for at, word in enumerate(words)]
        )
    try:
        return PromptFile([int(word) for word in words], None)
    except ValueError as error:
        raise UsageError(
            f"{args.prompt} has something other than token ids: {error}; tokenize the prompt "
            "first, or use --keys for block hashes in hex",
            code="bad_tokens",
        ) from error


def hex_bytes(text: str, what: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise UsageError(f"{what} is {text[:80]!r}, which is not hex", code="bad_key") from error


def _words(path: str) -> list[str]:
    try:
        if path == "-":
            text = sys.stdin.read(_MOST_BYTES + 1)
        else:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(_MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", code="bad_file") from error
    if len(text) > _MOST_BYTES:
        raise UsageError(
            f"{path} has over {_MOST_BYTES} bytes, more than any prompt", code="bad_file"
        )
    if text.lstrip().startswith("["):
        try:
            return [str(item) for item in json.loads(text)]
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is no JSON list: {error}", code="bad_file") from error
    return text.replace(",", " ").split()
