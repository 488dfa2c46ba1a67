"""`kvwarehouse doctor ENGINE`: will this engine and this warehouse work together, and if not, why.
`kvwarehouse doctor gpu`: what this machine has for GPUs, and how NVMe reaches them.
`kvwarehouse doctor host`: what this machine allows a daemon, and what is to be set otherwise.

It is an entry point of the group kvwarehouse.commands: `command` gets the arguments after the name.
Looks and reports; changes nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvwarehouse.host import Finding

SUMMARY = "Say whether an engine and the warehouse fit here, and what to mend."

_GPU = "gpu"
_HOST = "host"
_LONGEST_S = 3600.0

_ABOUT = """\
Looks at everything that an engine and the warehouse need of each other on this machine, and says
for each thing whether it is right and, where it is not, what to do. It changes nothing.

Run it with the engine's own Python environment, as the engine's user, with its environment
variables, and in its container: those are what it looks at. It imports the engine in a process of
its own, which takes some seconds, and starts no model.
"""

_EXAMPLES = """\
engines:
  vllm       vLLM 0.32 and later (docs/vllm.md)
  sglang     SGLang 0.5.23 and later (docs/sglang.md)
  trtllm     TensorRT-LLM (docs/trtllm.md)
  gpu        no engine: driver, device, kvikio, GPUDirect Storage, and what is used instead of what
             is not there (docs/gpu.md)
  host       no engine: what limits a daemon here (memory, descriptors, locked memory, io_uring,
             huge pages, NUMA, disks, what a remote tier needs), to what value it is to be set, and
             by which command; of the daemon that runs, else of one that is started with --dram,
             --nvme-dir and so on

--config is what the engine is given, as JSON or as a .json, .toml or .yaml file:
  vllm       of --kv-transfer-config
  sglang     of --hicache-storage-backend-extra-config
  trtllm     of --extra_llm_api_options, a file

After "--" vllm takes a whole command line of `vllm serve`: vLLM reads it, as if to start, and the
doctor says whether such an engine is served. --config is then read from it.

examples:
  kvwarehouse doctor vllm
  kvwarehouse doctor vllm --address unix:///run/kvw/kvw.sock --model ./llama --page-tokens 16
  kvwarehouse doctor vllm -- vllm serve ./llama --kv-transfer-config "$CONFIG" -tp 2
  kvwarehouse doctor sglang --config @extra.json --model ./llama --page-tokens 64
  kvwarehouse doctor trtllm --config config.yaml --model llama-3.3-70b
  kvwarehouse doctor gpu --segments /nvme/kvwarehouse/segments
  kvwarehouse doctor host --dram 64GiB --nvme-dir /nvme/kvwarehouse --nvme-capacity 1TB
  kvwarehouse doctor vllm --json | jq '.checks[] | select(.verdict == "fail")'

verdicts:
  ok         as it should be
  warn       it works, but not as well or as surely as it could
  fail       the warehouse cannot serve this engine until it is mended
  skip       could not be looked at; another line, or this one, says why

exit status: 0 when nothing fails, 1 when something does, 2 for wrong arguments.
"""


def command(arguments: list[str]) -> int:
    """Runs the doctor; returns the exit status."""
    parser = _parser()
    own, command_line = _split(arguments)
    args = parser.parse_args(own)
    args.command_line = command_line
    if command_line and args.engine != "vllm":
        parser.error("only the arguments of `vllm serve` are read after --")
    from kvwarehouse.host import healthy
    from kvwarehouse_connectors.doctor.show import print_json, print_table

    looks = {_GPU: _gpu, _HOST: _host}
    findings = looks.get(args.engine, _engine)(args)
    (print_json if args.json else print_table)(args.engine, findings)
    return 0 if healthy(findings) else 1


def _engine(args: argparse.Namespace) -> list[Finding]:
    from kvwarehouse_connectors.doctor.engines import engine_of
    from kvwarehouse_connectors.doctor.look import Asked, look

    if sys.stderr.isatty() and not args.json:
        wait = f"at most {args.timeout:g} s (--timeout)"
        print(f"Importing {args.engine} to look at it: up to a minute, {wait} ...", file=sys.stderr)
    asked = Asked(
        args.address,
        args.config,
        args.model,
        args.page_tokens,
        args.kv_dtype,
        args.timeout,
        tuple(args.command_line),
    )
    return engine_of(args.engine).findings_of(look(args.engine, asked))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The doctor's own arguments, and those of `vllm serve` behind "--"."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    own, line = arguments[:place], arguments[place + 1 :]
    return own, line[2:] if line[:2] == ["vllm", "serve"] else line


def _gpu(args: argparse.Namespace) -> list[Finding]:
    import kvwarehouse as kvw
    from kvwarehouse_connectors.doctor.gpu import findings_of

    if not args.segments:
        return findings_of(kvw.gpu.probe_machine(min(args.timeout, kvw.gpu.PROBE_TIMEOUT_S)), None)
    choice = kvw.gpu.select_path(Path(args.segments), again=True)
    return findings_of(choice.machine, choice)


def _host(args: argparse.Namespace) -> list[Finding]:
    import kvwarehouse as kvw
    from kvwarehouse.host import Tiers, judge
    from kvwarehouse_connectors.doctor.look import core_memory, daemon_facts

    daemon = daemon_facts(args.address or kvw.default_address())
    asked = Tiers(
        args.dram,
        args.nvme_capacity,
        args.arena_dir,
        args.nvme_dir,
        remote=args.remote,
        fleet_secret=args.fleet_secret,
        index_pages=args.index_pages,
        policy=args.policy,
    )
    return judge(daemon.address, daemon.path, daemon.error, daemon.status, asked, core_memory)


def _parser() -> argparse.ArgumentParser:
    from kvwarehouse_connectors.doctor.engines import ENGINES

    about = (*ENGINES, _GPU, _HOST)
    parser = argparse.ArgumentParser(
        prog="kvwarehouse doctor",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("engine", choices=about, metavar="ENGINE", help=", ".join(about))
    parser.add_argument(
        "--config",
        metavar="JSON|FILE",
        default="",
        help="The engine's configuration of the connector, see below; it is read by the"
        " connector's own code. Default: only the environment is read.",
    )
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        default="",
        help="The daemon to look at: unix:///path/kvw.sock. Default: that of --config, else"
        " $KVW_ADDRESS, else the socket that `kvwarehouse serve` uses by default.",
    )
    parser.add_argument(
        "--model",
        metavar="PATH|NAME",
        default="",
        help="A config.json, the folder it is in, or a name of `kvwarehouse size --list`: whether"
        " its pages fit the daemon.",
    )
    parser.add_argument(
        "--page-tokens",
        metavar="N",
        type=_page_tokens,
        default=0,
        help="Tokens of a page: the engine's block or page size. Default: what --config says, else"
        " the engine's own default (vllm 16, on a CPU 128; sglang 1, trtllm 32).",
    )
    parser.add_argument(
        "--kv-dtype",
        metavar="NAME",
        default="",
        help="Of the KV, as `kvwarehouse size --dtype` takes it. Default: 16 bits.",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_timeout_s,
        default=180.0,
        help="Bound of importing the engine (default: 180; the first import of a new installation"
        " takes minutes on a slow disk).",
    )
    parser.add_argument(
        "--segments",
        metavar="DIR",
        default="",
        help="For gpu: the daemon's folder of segments, NVME_DIR/segments. Measures each way from"
        " there to the device, half a minute each at most, reads only; clients remember it.",
    )
    host = parser.add_argument_group("for host, where no daemon runs that says it")
    host.add_argument(
        "--dram", metavar="SIZE", type=_size, default=0, help="As `kvwarehouse serve` takes it."
    )
    host.add_argument("--nvme-capacity", metavar="SIZE", type=_size, default=0, help="Likewise.")
    host.add_argument("--arena-dir", metavar="DIR", default="", help="Likewise.")
    host.add_argument("--nvme-dir", metavar="DIR", default="", help="Likewise.")
    host.add_argument(
        "--index-pages", metavar="COUNT", type=_index_pages, default=0, help="Likewise."
    )
    host.add_argument("--policy", choices=("lru", "adaptive"), default="", help="Likewise.")
    host.add_argument("--remote", metavar="URL", default="", help="Likewise.")
    host.add_argument("--fleet-secret", metavar="FILE", default="", help="Likewise.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead.")
    return parser


def _size(text: str) -> int:
    import kvwarehouse as kvw

    try:
        return kvw.parse_size(text)
    except kvw.UsageError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def _timeout_s(text: str) -> float:
    """Infinity is refused, as is a time that is none: every wait has an end."""
    seconds = float(text)
    if not 0 <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"{text} is not a number of seconds from 0 to {_LONGEST_S:g}"
        )
    return seconds


def _index_pages(text: str) -> int:
    pages = int(text)
    if not 0 <= pages <= 1 << 30:
        raise ValueError
    return pages


def _page_tokens(text: str) -> int:
    tokens = int(text)
    if not 1 <= tokens <= 1 << 20:
        raise ValueError
    return tokens
