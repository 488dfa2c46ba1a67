"""`kvwarehouse route`: which of several warehouses a request should go to."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from kvwarehouse.cli.connection import token_from
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, print_json, print_table
from kvwarehouse.cli.prompt_file import add_prompt, hex_bytes, prompt_from
from kvwarehouse.client.routing import Answer, Question, who_has
from kvwarehouse.client.scoring import Candidate, Costs, Ranking, choose
from kvwarehouse.errors import UsageError

EXAMPLES = """\
  kvwarehouse route prompt.json --address unix:///run/kvw/a.sock --address unix:///run/kvw/b.sock
  kvwarehouse route prompt.json --address host-a:7070 --address host-b:7070 --tls ca.pem \\
      --token-file token --requests host-a:7070=3 --json
  tokenize < prompt.txt | kvwarehouse route - --model my-model --address host-a:7070

Each daemon says how many tokens of the prompt it has, in DRAM and on NVMe (gRPC's WhoHas). The
score is in tokens of prefill saved, and the highest is chosen:

  score = tokens in DRAM x (1 - cost of DRAM) + tokens on NVMe x (1 - cost of NVMe)
          - requests under way there x cost of a request

A cost is what loading a token takes of what computing it would; `kvwarehouse plan` and `bench` say
what it is on your hardware. Ties go to fewer requests, then to more in DRAM, then to the warehouse
whose id hashes highest with the prompt's first 256 tokens: prompts that begin alike meet again
where the first of them was stored, and others spread. Who does not answer in time, or drains, is
left out, and said.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Costs()
    add_prompt(parser)
    parser.add_argument(
        "--address",
        action="append",
        required=True,
        metavar="ADDRESS",
        help="A warehouse: unix:///path/kvw.sock, or host:port. Give it several times.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default="", help="Only namespaces of this model's name.")
    which.add_argument(
        "--namespace",
        default="",
        metavar="ID",
        help="Only this one, by its id. One with a salt is asked in no other way.",
    )
    parser.add_argument(
        "--requests",
        action="append",
        default=[],
        metavar="ADDRESS=N",
        help="Requests under way at that warehouse's engines, as your router knows (default: 0).",
    )
    for name, value, what in (
        ("dram", default.dram, "loading a token from DRAM, in tokens computed, 0 to 1"),
        ("nvme", default.nvme, "loading a token from NVMe, in tokens computed, 0 to 1"),
        ("request", default.request_tokens, "a request under way, in tokens"),
    ):
        parser.add_argument(
            f"--cost-{name}",
            type=float,
            default=value,
            metavar="N",
            help=f"Cost of {what} (default: {value:g}).",
        )
    parser.add_argument(
        "--timeout",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="How long all of them together may take to answer (default: 1).",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="File with the token for host:port addresses. Default: $KVW_TOKEN.",
    )
    parser.add_argument(
        "--tls",
        nargs="?",
        const=True,
        metavar="CA.pem",
        help="Use TLS for host:port; CA.pem is the authority to trust, else the system's.",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    costs = Costs(args.cost_dram, args.cost_nvme, args.cost_request)
    question = _question(args)
    answers = who_has(
        args.address,
        question,
        token=token_from(args.token_file, os.environ),
        tls=args.tls,
        timeout_s=args.timeout,
    )
    ranking = choose(answers, question, costs=costs, requests=_requests(args.requests))
    if args.json:
        print_json(_fields(ranking))
    else:
        _show(ranking)
    return Exit.OK if ranking.best else Exit.NO_DAEMON


def _question(args: argparse.Namespace) -> Question:
    namespace_id = hex_bytes(args.namespace, "--namespace") if args.namespace else b""
    prompt = prompt_from(args)
    return Question(prompt.tokens, prompt.keys, args.model, namespace_id)


def _requests(given: Sequence[str]) -> dict[str, float]:
    requests = {}
    for item in given:
        address, _, number = item.rpartition("=")
        try:
            requests[address] = float(number)
        except ValueError:
            requests[address] = -1.0
        if not 0 <= requests[address] < 1e9:
            raise UsageError(
                f"--requests {item!r} is not ADDRESS=N with a number of 0 or more",
                code="bad_requests",
            )
    return requests


def _show(ranking: Ranking) -> None:
    if ranking.best is None:
        print("no warehouse to route to")
    else:
        print_table(
            "",
            ("warehouse", "name", ">score", ">DRAM tokens", ">NVMe tokens", ">requests", ">ms"),
            [_row(candidate) for candidate in ranking.candidates],
        )
        print(f"route to {ranking.best.answer.address}")
    for answer in ranking.left_out:
        print(f"left out {answer.address}: {answer.problem or 'it drains'}")


def _row(candidate: Candidate) -> tuple[Any, ...]:
    answer, held = candidate.answer, candidate.answer.holding
    return (
        answer.address,
        answer.name,
        f"{candidate.score:.1f}",
        held.dram_tokens if held else 0,
        held.nvme_tokens if held else 0,
        f"{candidate.requests:g}",
        f"{answer.seconds * 1000:.1f}",
    )


def _fields(ranking: Ranking) -> dict[str, Any]:
    return {
        "route_to": ranking.best.answer.address if ranking.best else None,
        "candidates": [
            {
                **_answer(candidate.answer),
                "score": candidate.score,
                "saved_tokens": candidate.saved_tokens,
                "requests": candidate.requests,
            }
            for candidate in ranking.candidates
        ],
        "left_out": [
            {"address": answer.address, "problem": answer.problem or "it drains"}
            for answer in ranking.left_out
        ],
    }


def _answer(answer: Answer) -> dict[str, Any]:
    held = answer.holding
    return {
        "address": answer.address,
        "warehouse_id": answer.warehouse_id,
        "name": answer.name,
        "namespace_id": held.namespace_id if held else None,
        "tokens": held.tokens if held else 0,
        "dram_tokens": held.dram_tokens if held else 0,
        "nvme_tokens": held.nvme_tokens if held else 0,
        "streams": answer.streams,
        "promotions_in_flight": answer.promotions_in_flight,
        "nvme_read_bytes_per_s": answer.nvme_read_bytes_per_s,
        "seconds": answer.seconds,
    }
