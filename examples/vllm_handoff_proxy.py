"""A small proxy for prefill and decode engines of vLLM that share a warehouse (docs/vllm.md).

    python examples/vllm_handoff_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

Each request goes to a prefill engine first, for one token. What that engine's answer says in
`kv_transfer_params` goes unread to a decode engine with the request itself, and the decode engine's
answer, streamed or not, is the client's. The prefill is only ever a gain: whatever becomes of it,
the decode engine gets the request and computes what it does not find.

Needs aiohttp, which vLLM brings. Keeps nothing between requests; for one host and for reading, not
for the internet: no TLS, no limits on clients.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, web

_log = logging.getLogger("handoff")

PATHS = ("/v1/completions", "/v1/chat/completions")
# Asks an engine that is no kv_producer for a record too; a producer always gives one.
ASK = {"kvwarehouse.handoff": True}
# Only for the whole answer: a prefill has one token.
_ANSWER_ONLY = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "best_of")
_BODY_BYTES = 64 << 20
_CONNECT_S = 5.0


class Engines:
    """Addresses that take turns."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = [address.rstrip("/") for address in addresses]
        self._turn = 0

    def in_turn(self) -> list[str]:
        """All of them, beginning with the next one's turn."""
        at = self._turn = (self._turn + 1) % len(self._addresses)
        return self._addresses[at:] + self._addresses[:at]


class Proxy:
    def __init__(self, prefill: Engines, decode: Engines, prefill_s: float) -> None:
        """prefill_s: a prefill that takes longer is given up, and the decode engine computes."""
        self._prefill = prefill
        self._decode = decode
        self._prefill_s = prefill_s

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_BODY_BYTES)
        app.cleanup_ctx.append(self._session_of)
        app.add_routes([web.post(path, self.complete) for path in PATHS])
        app.add_routes([web.get("/v1/models", self.models), web.get("/health", _health)])
        return app

    async def _session_of(self, app: web.Application) -> AsyncIterator[None]:
        # No bound on an answer: it may be long. One on the prefill is set where it is asked for.
        timeout = ClientTimeout(total=None, sock_connect=_CONNECT_S)
        async with ClientSession(timeout=timeout) as self._session:
            yield

    async def complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError:
            return _error(400, "the body is not JSON")
        if not isinstance(body, dict):
            return _error(400, "the body is not a JSON object")
        record = await self._record(request, body)
        if record:
            body = {**body, "kv_transfer_params": {**_params(body), **record}}
        return await self._answer(request, body)

    async def models(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, None)

    async def _record(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        """What a prefill engine says to whoever goes on with this prompt; {} for nothing."""
        asked = {name: value for name, value in body.items() if name not in _ANSWER_ONLY}
        asked |= {"max_tokens": 1, "n": 1, "stream": False}
        asked |= {"kv_transfer_params": {**_params(body), **ASK}}
        if "max_completion_tokens" in body:
            asked["max_completion_tokens"] = 1
        try:
            async with (
                asyncio.timeout(self._prefill_s),
                self._asked(self._prefill, request, asked) as answer,
            ):
                if answer.status == web.HTTPOk.status_code:
                    found = (await answer.json()).get("kv_transfer_params")
                    return found if isinstance(found, dict) else {}
                _log.warning("prefill: %d %s", answer.status, (await answer.text())[:200])
        except (ClientError, OSError, TimeoutError, ValueError, AttributeError) as error:
            _log.warning("prefill: %s: %s; the decode engine computes", type(error).__name__, error)
        return {}

    async def _answer(
        self, request: web.Request, body: dict[str, Any] | None
    ) -> web.StreamResponse:
        """The decode engine's, as it comes."""
        mine: web.StreamResponse | None = None
        try:
            async with self._asked(self._decode, request, body) as answer:
                kind = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
                mine = web.StreamResponse(status=answer.status, headers=kind)
                await mine.prepare(request)
                async for piece in answer.content.iter_any():
                    await mine.write(piece)
                await mine.write_eof()
                return mine
        except (ClientError, OSError) as error:
            _log.warning("decode: %s: %s", type(error).__name__, error)
            if mine is None:
                return _error(502, f"no decode engine answers: {type(error).__name__}")
            if request.transport is not None:
                request.transport.abort()  # an answer that broke off must not look whole
            return mine

    @asynccontextmanager
    async def _asked(
        self, engines: Engines, request: web.Request, body: dict[str, Any] | None
    ) -> AsyncIterator[ClientResponse]:
        """An engine's answer: of the next one in turn that takes the connection. One that dies
        later is not replaced: it may have begun."""
        headers = {n: v for n, v in request.headers.items() if n.lower() == "authorization"}
        in_turn = engines.in_turn()
        for place, address in enumerate(in_turn):
            try:
                answer = await self._session.request(
                    request.method, address + request.path, json=body, headers=headers
                )
                break
            except ClientError:
                if place == len(in_turn) - 1:
                    raise
        async with answer:
            yield answer


def _params(body: dict[str, Any]) -> dict[str, Any]:
    params = body.get("kv_transfer_params")
    return params if isinstance(params, dict) else {}


async def _health(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


def _error(status: int, what: str) -> web.Response:
    return web.json_response({"error": {"message": what, "code": status}}, status=status)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A prefill/decode proxy for vLLM engines that share a warehouse."
    )
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--prefill-timeout-s",
        type=float,
        default=60.0,
        help="A prefill that takes longer is given up; the decode engine computes. Default: 60.",
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    proxy = Proxy(Engines(args.prefill), Engines(args.decode), args.prefill_timeout_s)
    # A client that hangs up ends its request in the engines too.
    web.run_app(
        proxy.application(),
        host=args.host,
        port=args.port,
        handler_cancellation=True,
        print=None,
    )


if __name__ == "__main__":
    main()
