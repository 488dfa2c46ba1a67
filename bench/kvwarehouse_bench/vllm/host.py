"""An engine's process: vLLM's LLM, driven by lines of JSON on a socket. Run as

    python -m kvwarehouse_bench.vllm.host DESCRIPTOR OPTIONS

as harness/process.py has them. Times are taken here, around the engine alone.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import Any

from kvwarehouse_bench.harness.process import serve
from kvwarehouse_bench.vllm.messages import counts_now, difference


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
            "params": getattr(outputs[0], "kv_transfer_params", None),
        }

    def do_forget(self, connector: bool) -> bool:
        return bool(self._llm.reset_prefix_cache(reset_connector=connector))


def _ttft_s(output: Any) -> float:
    metrics = output.metrics
    return float(metrics.first_token_latency) if metrics is not None else 0.0


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), lambda: Host(json.loads(sys.argv[2])))
