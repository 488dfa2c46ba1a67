"""An engine's process: vLLM's LLM, driven by lines of JSON on a socket. Run as

    python -m vllm_bench.host DESCRIPTOR OPTIONS

Each line in is {"do": name, "with": arguments}, each line out {"what": value} or {"error": text},
in turns; the first line out says that the engine is ready. Times are taken here, around the engine
alone. Ends, with all its processes, when the socket does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

from vllm_bench.messages import counts_now, difference


class Host:
    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**options)

    def do_generate(self, asks: list[dict[str, Any]]) -> dict[str, Any]:
        from vllm import SamplingParams

        prompts: Any = [{"prompt_token_ids": ask["tokens"]} for ask in asks]
        sampling = [
            SamplingParams(
                max_tokens=ask["max_tokens"],
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": ask["params"]} if ask["params"] else None,
            )
            for ask in asks
        ]
        before = counts_now()
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        return {
            "seconds": seconds,
            "ttft_s": [_ttft_s(output) for output in outputs],
            "counts": difference(counts_now(), before),
        }

    def do_forget(self, connector: bool) -> bool:
        return bool(self._llm.reset_prefix_cache(reset_connector=connector))


def _ttft_s(output: Any) -> float:
    metrics = output.metrics
    return float(metrics.first_token_latency) if metrics is not None else 0.0


def serve(connection: socket.socket, options: dict[str, Any]) -> None:
    with connection.makefile("rwb") as lines:

        def say(message: dict[str, Any]) -> None:
            lines.write(json.dumps(message).encode() + b"\n")
            lines.flush()

        try:
            host = Host(options)
        except Exception:  # noqa: BLE001 - the process's edge: the bench gets it
            say({"error": traceback.format_exc()})
            return
        say({"what": None})
        for line in lines:
            asked = json.loads(line)
            if asked["do"] == "quit":
                return
            try:
                say({"what": getattr(host, f"do_{asked['do']}")(**asked["with"])})
            except Exception:  # noqa: BLE001 - as above
                say({"error": traceback.format_exc()})
    os.killpg(0, signal.SIGKILL)  # the bench is gone without a word


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
