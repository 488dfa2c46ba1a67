"""`kvwarehouse demo`: what reuse of KV saves, on a real transformer and real text.

It is an entry point of the group kvwarehouse.commands: `command` gets the arguments after the name.
"""

from __future__ import annotations

import argparse
import os
import time
from importlib.util import find_spec

SUMMARY = "Show what reuse of KV saves on this machine, in under three minutes."

# Said when the command is loaded, so that the command line can name the extra to install.
for _module in ("torch", "transformers", "tokenizers"):
    if find_spec(_module) is None:
        raise ModuleNotFoundError(f"No module named {_module!r}", name=_module)

_ABOUT = """\
Builds a small Llama-architecture model, reads a document to it, and asks different questions about
the same document. Compares the time to the first token of each answer: the whole prompt computed,
or the document's KV loaded from a warehouse: from DRAM, from DRAM after `kill -9` of the daemon,
and from NVMe after the DRAM tier was deleted. Checks that all four give the same bits.

Each figure is the better of two runs, made in turns. The whole ends within three minutes: on a slow
or busy machine with fewer rows.

Everything happens in temporary directories, with a daemon of its own, and is removed at the end.
"""

_EXAMPLES = """\
examples:
  kvwarehouse demo
  kvwarehouse demo --max-tokens 2048             a shorter document
  kvwarehouse demo --model ~/models/my-llama     a real checkpoint, real answers
  kvwarehouse demo --json > demo.json

exit status: 0 when everything that must be equal is; 4 when something is not.
"""


def command(arguments: list[str]) -> int:
    """Runs the demo; returns the exit status."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="kvwarehouse demo",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="Directory of a checkpoint that transformers can read (causal LM, plain cache)."
        " Default: a model of 82M random weights, built on the spot.",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        help="Longest prompt, 1024 or more, however long it takes. Default: 8192, or what this"
        " machine measures in three minutes.",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="UTF-8 text to ask about. Default: the reference manual inside Python itself.",
    )
    parser.add_argument(
        "--dir",
        metavar="PATH",
        help="Disk to use as the NVMe tier: a temporary directory is made in it. Default: the"
        " system's temporary directory.",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead.")
    args = parser.parse_args(arguments)
    _wait_asleep()
    from kvwarehouse_connectors.transformers.demo.run import Request, run

    request = Request(args.model, args.max_tokens, args.text, args.dir)
    return run(request, started=started, as_json=args.json)


def _wait_asleep() -> None:
    """The threads of one matrix product wait for each other. By default they do so spinning, and
    where other programs want the cores too, a thread then spins away the very time that the one it
    waits for needs: measured on two busy cores, the same prompt took 12 s instead of 0.5 s. OpenMP
    reads the variable once, when torch is imported, so it is set before that."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
