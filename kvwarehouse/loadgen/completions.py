"""An engine behind an OpenAI-compatible /v1/completions: token ids there, a stream back.

Thread-safe; a connection for each request, because a server may end one that idles just when it is
used again, and that would be counted as the engine's failure. Clock: monotonic, from before the
connection is made, as a user would see it.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import Any

from kvwarehouse.loadgen.completion_events import (
    FailedError,
    MalformedError,
    Reading,
    event_data,
    parsed,
)
from kvwarehouse.loadgen.endpoint import Cutoff, HttpEndpoint, Line
from kvwarehouse.loadgen.prompts import Prompt, PromptShape, prompt_of
from kvwarehouse.loadgen.results import INTERRUPTED, EngineAnswer, EngineResults
from kvwarehouse.workloads.call import WorkloadCall

# Fields that not every server takes: left out for good once it has named them in a refusal.
_OPTIONAL = ("ignore_eos", "stream_options")
_REFUSED = (400, 422)
_MOST_REFUSAL_BYTES = 16_384
_PART_BYTES = 65_536


class Completions:
    def __init__(
        self,
        endpoint: HttpEndpoint,
        model: str,
        shape: PromptShape,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = endpoint
        self._model = model
        self._shape = shape
        self._clock = clock
        self._cutoff = Cutoff(clock)
        self._left_out: set[str] = set()
        self.answers = EngineResults(clock())

    @property
    def left_out(self) -> list[str]:
        """Fields that the server refused."""
        return sorted(self._left_out)

    def ask(self, request: WorkloadCall, deadline_s: float) -> None:
        prompt = prompt_of(request, self._shape)
        begin_s = self._clock()
        try:
            answer = self._asked(prompt, begin_s, begin_s + deadline_s)
        except FailedError as failed:
            self.answers.fail(failed.reason, failed.detail, self._clock())
        else:
            self.answers.answer(answer)

    def hang_up(self) -> None:
        self._cutoff.hang_up()

    def close(self) -> None:
        self._cutoff.close()

    def _asked(self, prompt: Prompt, begin_s: float, end_s: float) -> EngineAnswer:
        """Again at once where the server refuses a field that can be left out."""
        while True:
            body = self._body(prompt)
            try:
                return self._exchange(body, prompt, begin_s, end_s)
            except FailedError as failed:
                named = {name for name in _OPTIONAL if name in body and name in failed.detail}
                if failed.status not in _REFUSED or not named:
                    raise
                self._left_out |= named

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": prompt.tokens.tolist(),
            "max_tokens": prompt.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        return {name: value for name, value in body.items() if name not in self._left_out}

    def _exchange(
        self, body: dict[str, Any], prompt: Prompt, begin_s: float, end_s: float
    ) -> EngineAnswer:
        if self._cutoff.over:
            raise FailedError(INTERRUPTED)
        connection = self._endpoint.connected(end_s - self._clock())
        try:
            with self._cutoff.line(connection.sock, end_s) as line:
                try:
                    return self._answer(connection, body, prompt, begin_s)
                except (OSError, http.client.HTTPException, FailedError) as error:
                    raise _failure(line, error) from None
        finally:
            connection.close()

    def _answer(
        self,
        connection: http.client.HTTPConnection,
        body: dict[str, Any],
        prompt: Prompt,
        begin_s: float,
    ) -> EngineAnswer:
        connection.request(
            "POST", self._endpoint.path, json.dumps(body).encode(), self._endpoint.headers
        )
        response = connection.getresponse()
        kind = response.headers.get_content_type()
        if response.status != http.client.OK or kind != "text/event-stream":
            text = response.read(_MOST_REFUSAL_BYTES).decode("utf-8", "replace")
            if response.status != http.client.OK:
                raise FailedError(f"http_{response.status}", text, response.status)
            raise FailedError("not_a_stream", f"{kind}: {text}")
        reading = Reading(prompt.output_tokens)
        try:
            for data in event_data(lambda: response.read1(_PART_BYTES)):
                reading.take(parsed(data), self._clock())
                if reading.done:
                    break
        except MalformedError as error:
            raise FailedError("malformed", str(error)) from error
        return reading.answer(begin_s, self._clock())


def _failure(line: Line, error: Exception) -> FailedError:
    """What ended the exchange: our own cut, before whatever that looked like from here."""
    if line.cut:
        return FailedError(line.cut, "" if line.cut == INTERRUPTED else "the answer was not whole")
    if isinstance(error, FailedError):
        return error
    if isinstance(error, TimeoutError):
        return FailedError("deadline", "nothing came any more")
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        return FailedError("connection_lost", what)
    cut_off = isinstance(error, http.client.IncompleteRead)
    return FailedError("cut_off" if cut_off else "malformed", what)
