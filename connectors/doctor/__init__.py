"""`kvwarehouse doctor ENGINE`: will this engine and this warehouse work together, and if not, why.

It is an entry point of the group kvwarehouse.commands: `command` gets the arguments after the name.
Looks and reports; changes nothing.
"""

from __future__ import annotations

import argparse

_ABOUT = """\
Looks at everything that an engine and the warehouse need of each other on this machine, and says
for each thing whether it is right and, where it is not, what to do. It changes nothing.

Run it with the engine's own Python environment, as the engine's user, and in its container: those
are what it looks at. It imports the engine in a process of its own, which takes some seconds, and
starts no model.
"""

_EXAMPLES = """\
engines:
  vllm       vLLM 0.32 and later (docs/vllm.md)

examples:
  kvwarehouse doctor vllm
  kvwarehouse doctor vllm --address unix:///run/kvw/kvw.sock
  kvwarehouse doctor vllm --json | jq '.checks[] | select(.verdict == "fail")'

verdicts:
  ok         as it should be
  warn       it works, but not as well or as surely as it could
  fail       the warehouse cannot serve this engine until it is mended
  skip       could not be looked at; another line says why

exit status: 0 when nothing fails, 1 when something does, 2 for wrong arguments.
"""


def command(arguments: list[str]) -> int:
    """Runs the doctor; returns the exit status."""
    args = _parser().parse_args(arguments)
    from kvwarehouse_connectors.doctor.findings import healthy
    from kvwarehouse_connectors.doctor.look import look
    from kvwarehouse_connectors.doctor.show import print_json, print_table
    from kvwarehouse_connectors.doctor.vllm import findings_of

    findings = findings_of(look(args.address, args.timeout))
    (print_json if args.json else print_table)(args.engine, findings)
    return 0 if healthy(findings) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvwarehouse doctor",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("engine", choices=["vllm"], metavar="ENGINE", help="vllm")
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        default="",
        help="The daemon, as the engine is given it: unix:///path/kvw.sock. Default:"
        " $KVW_ADDRESS, else the socket that `kvwarehouse serve` uses by default.",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=180.0,
        help="Bound of importing the engine (default: 180; the first import of a new installation"
        " takes minutes on a slow disk).",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead.")
    return parser
