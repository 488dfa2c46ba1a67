"""A request as connectors see it: the attributes that the C++ class binds, and no others [C++]."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum


class State(Enum):
    CONTEXT_INIT = "context_init"
    LOADING = "disagg_generation_trans_in_progress"
    GENERATION = "generation_in_progress"
    SAVING = "disagg_context_trans_in_progress"
    COMPLETE = "complete"


def salt_id(salt: str | None) -> int | None:
    """The C++ request has a number in place of the text."""
    if salt is None:
        return None
    return int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "little")


@dataclass
class Submitted:
    """What a client asks for; goes to every rank."""

    request_id: int
    tokens: list[int]
    new_tokens: int
    cache_salt: str | None = None
    beside: dict[str, object] = field(default_factory=dict)
    """Attributes that other kinds of requests have, such as lora_task_id."""


class LlmRequest:
    def __init__(self, submitted: Submitted, chunk_tokens: int) -> None:
        self.request_id = submitted.request_id
        self.prompt_len = len(submitted.tokens)
        self.cache_salt_id = salt_id(submitted.cache_salt)
        self.is_generation_only_request = False
        self.is_dummy_request = False
        self.context_current_position = 0
        self.context_chunk_size = chunk_tokens
        for name, value in submitted.beside.items():
            setattr(self, name, value)
        self._tokens = list(submitted.tokens)
        self.model = Private(submitted)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self._tokens)

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_len - self.context_current_position

    def add_new_token(self, token: int) -> None:
        self._tokens.append(token)

    def pause(self) -> None:
        """Its blocks are gone; what it generated becomes part of its prompt."""
        self.prompt_len = len(self._tokens)
        self.context_current_position = 0
        self.model.state = State.CONTEXT_INIT
        self.model.allocated = self.model.queried = False


class Private:
    """What the executor knows of a request, and connectors do not."""

    def __init__(self, submitted: Submitted) -> None:
        self.submitted = submitted
        self.state = State.CONTEXT_INIT
        self.queried = False
        self.allocated = False
        self.aborted = False
        self.left = submitted.new_tokens
        self.matched_tokens = 0
        """Of the connector's last answer, as the engine took it."""
        self.local_tokens = 0

    @property
    def salt(self) -> str | None:
        return self.submitted.cache_salt
