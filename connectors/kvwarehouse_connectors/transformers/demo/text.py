"""The document and the questions, as token ids. Deterministic; no network.

The text is real English that every Python brings: the reference manual behind `help()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvwarehouse as kvw

VOCABULARY = 4096
QUESTIONS = (
    "\n\nQuestion: What is the difference between a list and a tuple?\nAnswer:",
    "\n\nQuestion: When is the finally clause of a try statement executed?\nAnswer:",
    "\n\nQuestion: How does Python look up an attribute of an instance?\nAnswer:",
)


@dataclass(frozen=True)
class Workload:
    """A shared document, and questions to ask about it."""

    document: list[int]
    questions: list[list[int]]

    def prompt(self, tokens: int, question: int) -> list[int]:
        """`tokens` ids: the document's beginning, then a question."""
        asked = self.questions[question]
        return self.document[: tokens - len(asked)] + asked


def common_tokens(one: list[int], other: list[int]) -> int:
    """How many first tokens two prompts have in common."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def read_text(path: str | None) -> str:
    """Raises UsageError where there is no text."""
    if path is not None:
        try:
            return Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise kvw.UsageError(
                f"--text {path} cannot be read as UTF-8 text: {error}", code="bad_text"
            ) from error
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise kvw.UsageError(
            "this Python came without pydoc_data, the text of the demo; name one: --text FILE",
            code="no_text",
        ) from error
    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def train_tokenizer(text: str) -> Any:
    """A byte-level BPE tokenizer of at most 4,096 tokens; half a second for the default text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def workload(text: str, encode: Any, longest: int) -> Workload:
    """encode: text to ids. Raises UsageError where the text is too short for `longest` tokens."""
    # Enough for any tokenizer: none has fewer than one token for 50 characters of prose.
    document = encode(text[: longest * 50])
    questions = [encode(question) for question in QUESTIONS]
    if len(document) < longest:
        raise kvw.UsageError(
            f"the text has {len(document)} tokens, the longest prompt {longest}; give a longer"
            " --text, or a smaller --max-tokens",
            code="bad_text",
        )
    return Workload(document[:longest], questions)
