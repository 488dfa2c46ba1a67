"""An engine of one or more ranks: rank 0 in this process, each other in one of its own.

with Engine(Spec(ranks=2), address) as engine:
    engine.submit(tokens, new_tokens=2)
    engine.run()
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any, Self

from kvwarehouse_bench.harness.eventually import eventually
from trtllm_model import interface
from trtllm_model.cache import Cache
from trtllm_model.collectives import Collectives
from trtllm_model.executor import Executor, Limits
from trtllm_model.manager import Manager
from trtllm_model.pools import PoolLayout, PoolTensor
from trtllm_model.request import Submitted

_DEADLINE_S = 60.0
PATIENT_S = 60.0
"""How old a heartbeat of a daemon may be that counts as alive."""


@dataclass(frozen=True)
class Spec:
    ranks: int = 1
    kind: str = "pool"
    """pool: one tensor (V1); layout: regions in slots (V2)."""
    windows: tuple[int, ...] = ()
    """Of layer groups beside the one with full attention; layout only."""
    blocks: int = 40
    block_tokens: int = 8
    chunk_tokens: int = 1 << 30
    honours: int | None = None
    revision: str = "new"
    lags: tuple[int, ...] = (0, 0, 0, 0)
    """Steps by which each rank's worker reports late."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of LlmArgs, in place of the defaults."""
    rank_arguments: dict[int, dict[str, Any]] = field(default_factory=dict)
    """As arguments, of one rank alone."""
    module: str = "kvwarehouse_connectors.trtllm"


def llm_args(spec: Spec, address: str, rank: int = 0) -> Any:
    """As much of TorchLlmArgs as a connector reads."""
    values: dict[str, Any] = {
        "model": "/models/tiny",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "attn_backend": "TRTLLM",
        "max_seq_len": 4096,
        "max_beam_width": 1,
        "tensor_parallel_size": spec.ranks,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 1,
        "gpus_per_node": 8,
        "enable_attention_dp": False,
        "speculative_config": None,
        "quant_config": None,
        "kv_cache_config": SimpleNamespace(
            tokens_per_block=spec.block_tokens, dtype="auto", max_attention_window=None
        ),
        "kv_connector_config": SimpleNamespace(server_url=address),
    }
    return SimpleNamespace(**{**values, **spec.arguments, **spec.rank_arguments.get(rank, {})})


def build(spec: Spec, address: str, ranks: Collectives) -> Executor:
    """[E] the start: both halves made at the same time, the cache registered, then the wait."""
    interface.RANK[0] = ranks.rank
    module = import_module(spec.module)
    arguments = llm_args(spec, address, ranks.rank)
    with ThreadPoolExecutor(max_workers=2) as pool:
        worker_made = pool.submit(module.WarehouseWorker, arguments)
        made = None if ranks.rank else pool.submit(module.WarehouseScheduler, arguments)
        scheduler = made.result() if made else None
        worker = worker_made.result()
    worker.register_forward_pass_callable()
    memory: Any = (
        PoolTensor(ranks.rank, spec.blocks, spec.block_tokens)
        if spec.kind == "pool"
        else PoolLayout(ranks.rank, spec.blocks, spec.block_tokens, spec.windows)
    )
    try:
        memory.register(worker)
        if scheduler is not None and spec.revision == "new":
            scheduler.wait_for_initialization()
    except BaseException:
        for half in (worker, scheduler):
            if half is not None:
                half.shutdown()  # the engine's process would end
        raise
    manager = Manager(worker, scheduler, ranks, spec.revision, spec.lags[ranks.rank])
    cache = Cache(memory, spec.block_tokens, chunked=spec.kind == "layout")
    return Executor(cache, manager, Limits(spec.chunk_tokens, spec.honours))


def run_rank(
    rank: int, spec: Spec, address: str, environment: dict[str, str], peer: Any, commands: Any
) -> None:
    """A rank's process: does what rank 0 does."""
    os.environ.clear()
    os.environ.update(environment)
    interface.install(spec.revision)
    import_module("kvwarehouse_connectors.core.daemon_connection")._STALLED_S = PATIENT_S
    ranks = Collectives(rank, [peer])
    try:
        executor = build(spec, address, ranks)
        commands.send("ready")
        while (command := commands.recv())[0] != "close":
            name, *arguments = command
            if name == "counts":
                commands.send(executor.manager.worker.side.counts[arguments[0]])
            elif name == "storing":
                commands.send(storing(executor))
            elif name == "idle_blocks":
                commands.send(executor.cache.idle_blocks())
            elif name == "forget_reusable":
                executor.cache.forget_reusable()
            else:
                getattr(executor, name)(*arguments)
        executor.manager.worker.shutdown()
    except EOFError:
        pass  # the test is over
    except BaseException as error:
        ranks.fail(error)
        raise SystemExit(0 if isinstance(error, Exception) else 1) from error


def storing(executor: Any) -> bool:
    """Whether blocks are on their way to the warehouse."""
    return bool(executor.manager.worker.side._store_queue._ring.used_bytes)


def _server() -> Any:
    """Ranks are forked from a process that has imported this module, and no more: a start of Python
    each would take longer than most tests."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    # It is not told of the path that pytest has put this module on, and goes on without a word
    # where it cannot import it.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return server


class Engine:
    def __init__(self, spec: Spec, address: str) -> None:
        self.spec = spec
        self._next = 0
        server = _server()
        peers, self._commands, self._processes = [], [], []
        for rank in range(1, spec.ranks):
            mine, theirs = server.Pipe()
            ours, commands = server.Pipe()
            process = server.Process(
                target=run_rank,
                args=(rank, spec, address, dict(os.environ), theirs, commands),
                daemon=True,
            )
            process.start()
            theirs.close()
            commands.close()
            peers.append(mine)
            self._commands.append(ours)
            self._processes.append(process)
        self._ranks = Collectives(0, peers)
        try:
            self.executor = build(spec, address, self._ranks)
            for commands in self._commands:
                assert commands.poll(_DEADLINE_S), "a rank does not start"
                assert commands.recv() == "ready"
        except BaseException as error:
            self._ranks.fail(error)
            self._end_processes()
            raise

    # -- what clients do -------------------------------------------------------------------------

    def submit(
        self, tokens: list[int], new_tokens: int = 1, salt: str | None = None, **beside: object
    ) -> int:
        """Returns its id."""
        self._next += 1
        self._all("submit", Submitted(self._next, tokens, new_tokens, salt, beside))
        return self._next

    def abort(self, name: int) -> None:
        self._all("abort", name)

    def preempt(self, name: int) -> None:
        self._all("preempt", name)

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._all("step")

    def run(self, most_steps: int = 20_000) -> None:
        """Until every request has ended."""
        pause = threading.Event()
        for _ in range(most_steps):
            if not self.executor.requests:
                return
            self.step()
            pause.wait(0.001)  # loads are under way: an engine's step takes as long
        states = {n: r.model.state for n, r in self.executor.requests.items()}
        raise AssertionError(f"not over after {most_steps} steps: {states}")

    def serve(self, tokens: list[int], new_tokens: int = 1, salt: str | None = None) -> int:
        """One request from its begin to its end; returns the tokens that the connector brought."""
        name = self.submit(tokens, new_tokens, salt)
        self.run()
        return self.executor.matched[name]

    def ready(self) -> Self:
        """Serves until every rank has said that it can load."""

        def asked() -> bool:
            self.serve([1])
            return bool(self.scheduler._barrier.complete())

        eventually(asked, "all ranks say that they are ready")
        return self

    # -- what tests see --------------------------------------------------------------------------

    @property
    def scheduler(self) -> Any:
        return self.executor.manager.scheduler.side

    @property
    def worker(self) -> Any:
        return self.executor.manager.worker.side

    def counted(self, name: str) -> list[int]:
        """Per rank, of the workers."""
        found = [self.worker.counts[name]]
        return found + self._ask("counts", name)

    def wait_stored(self, blocks: int) -> None:
        """Until every rank has stored at least so many blocks since its start, in all parts
        together, and has none on their way."""
        eventually(
            lambda: all(count >= blocks for count in self.counted("stored_blocks")),
            f"{blocks} blocks are stored",
        )
        eventually(
            lambda: not storing(self.executor) and not any(self._ask("storing")),
            "nothing is on its way to the warehouse",
        )

    def told(self) -> str:
        """What its connector knows of itself, for the report of a test that failed."""
        side = self.scheduler
        try:
            complete = str(side._barrier is not None and side._barrier.complete())
        except Exception as error:  # noqa: BLE001 - the test ended the engine itself
            complete = repr(error)
        return (
            f"scheduler {dict(side.counts._counts)}, worker {dict(self.worker.counts._counts)},"
            f" ready {complete}, problem {side._connection.problem!r},"
            f" daemon {side._connection.control()}"
        )

    def idle_blocks(self) -> list[list[int]]:
        """Per rank and pool."""
        return [self.executor.cache.idle_blocks(), *self._ask("idle_blocks")]

    def forget_reusable(self) -> None:
        """What the engine itself could use again."""
        for commands in self._commands:
            commands.send(("forget_reusable",))
        self.executor.cache.forget_reusable()

    # -- inside ----------------------------------------------------------------------------------

    def _all(self, name: str, *arguments: Any) -> None:
        for commands in self._commands:
            commands.send((name, *arguments))
        try:
            getattr(self.executor, name)(*arguments)
        except BaseException as error:
            self._ranks.fail(error)
            raise

    def _ask(self, *question: Any) -> list[Any]:
        answers = []
        for commands in self._commands:
            commands.send(question)
            assert commands.poll(_DEADLINE_S), f"a rank does not answer {question}"
            answers.append(commands.recv())
        return answers

    def _end_processes(self) -> None:
        for commands in self._commands:
            with suppress(OSError):  # it has ended
                commands.send(("close",))
        for process in self._processes:
            process.join(_DEADLINE_S)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_processes()
        self.executor.manager.worker.shutdown()
        self.executor.manager.scheduler.shutdown()
