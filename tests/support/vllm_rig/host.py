"""An engine's process: vLLM's AsyncLLM, driven by lines of JSON on a socket. Run as

    python -m vllm_rig.host DESCRIPTOR OPTIONS

Each line in is {"call": number, "do": name, "with": arguments}. Lines out are {"call": number,
"said": "first" | "done" | "error", "what": value}; "first" is a request's first token. Call 0 is
the start itself. Calls overlap. Ends when the socket does.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from vllm_rig.messages import Answer, Ask

_LINE_BYTES = 64 << 20


class Host:
    def __init__(self, engine: Any, say: Callable[[int, str, Any], None]) -> None:
        self._engine, self._say = engine, say
        self._adapters: dict[tuple[str, str], Any] = {}

    async def do(self, call: int, name: str, arguments: dict[str, Any]) -> None:
        try:
            what = await getattr(self, f"do_{name}")(call, **arguments)
        except Exception:  # noqa: BLE001  the process's edge: the test gets it
            self._say(call, "error", traceback.format_exc())
        else:
            self._say(call, "done", what)

    async def do_generate(self, call: int, **plain: Any) -> Any:
        ask = Ask(**plain)
        prompt: dict[str, Any] = {"prompt_token_ids": ask.tokens}
        if ask.salt is not None:
            prompt["cache_salt"] = ask.salt
        output, resets = None, ask.resets
        async for output in self._engine.generate(
            prompt, _sampling(ask), str(call), lora_request=self._adapter(ask)
        ):
            if output.outputs[0].token_ids and not output.finished:
                self._say(call, "first", None)
                if ask.gives_up:
                    await self._engine.abort(str(call))
                if resets:
                    resets = False
                    assert not await self.do_forget(call, True), "no block was in use any more"
        assert output is not None, "the engine answered nothing"
        assert not resets, "it ended with its first token"
        return asdict(_answer(output))

    async def do_abort(self, call: int, of: int) -> None:
        await self._engine.abort(str(of))

    async def do_forget(self, call: int, connector: bool) -> bool:
        """False: blocks are in use still."""
        return bool(await self._engine.reset_prefix_cache(reset_connector=connector))

    async def do_metrics(self, call: int) -> dict[str, float]:
        """Counters and gauges: sums over their labels."""
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    async def do_probe(self, call: int, method: str, arguments: list[Any]) -> Any:
        """What vllm_rig.probe answers, for each rank."""
        return await self._engine.collective_rpc(method, args=tuple(arguments))

    def _adapter(self, ask: Ask) -> Any:
        from vllm.lora.request import LoRARequest

        if ask.lora is None:
            return None
        key = (ask.lora[0], ask.lora[1])
        number = len(self._adapters) + 1
        return self._adapters.setdefault(key, LoRARequest(key[0], number, key[1]))


def _sampling(ask: Ask) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=ask.max_tokens,
        temperature=ask.temperature,
        seed=ask.seed,
        logprobs=ask.logprobs,
        prompt_logprobs=ask.prompt_logprobs,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": ask.kv} if ask.kv else None,
    )


def _answer(output: Any) -> Answer:
    said = output.outputs[0]
    return Answer(
        tokens=list(said.token_ids),
        candidates=[
            {token: entry.logprob for token, entry in step.items()} for step in said.logprobs or []
        ],
        cached=output.num_cached_tokens or 0,
        finish=said.finish_reason or "",
        kv=output.kv_transfer_params,
    )


async def serve(connection: socket.socket, options: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=_LINE_BYTES)

    def say(call: int, said: str, what: Any) -> None:
        writer.write(json.dumps({"call": call, "said": said, "what": what}).encode() + b"\n")

    try:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
    except Exception as error:  # noqa: BLE001  the process's edge: the test gets it
        traceback.print_exc()
        say(0, "error", f"{type(error).__name__}: {error}")
        await writer.drain()
        return
    say(0, "done", None)
    host = Host(engine, say)
    under_way = set()
    while line := await reader.readline():
        asked = json.loads(line)
        if asked["do"] == "quit":
            break
        task = asyncio.create_task(host.do(asked["call"], asked["do"], asked["with"]))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])))
