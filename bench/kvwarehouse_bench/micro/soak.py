"""`make soak`, for minutes: churn, crashes and restarts, and whether anything grew or was wrong. A
process of its own, because its memory is counted too."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from kvwarehouse.errors import WarehouseError
from kvwarehouse_bench.micro.figures import Figure
from kvwarehouse_bench.micro.options import Options

_SPARE_S = 300.0
_SOAK = "kvwarehouse_bench.strain.soak"


def measure(options: Options) -> list[Figure]:
    command = [
        sys.executable,
        "-P",
        "-m",
        _SOAK,
        "--json",
        "--minutes",
        str(options.sizes.soak_minutes),
    ]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60 * options.sizes.soak_minutes + _SPARE_S,
        check=False,
    )
    try:
        found: dict[str, Any] = json.loads(ran.stdout)
    except ValueError:
        raise WarehouseError(
            f"the soak ended with {ran.returncode}: {ran.stderr[-2000:]}"
        ) from None
    return figures(found, options.sizes.soak_minutes)


def figures(found: dict[str, Any], minutes: float) -> list[Figure]:
    """Of what the soak prints with --json; it ends without that where anything wrong is loaded."""
    done, warm, end = found["done"], found["warm"], found["end"]
    seconds = 60 * minutes
    return [
        Figure(
            f"soak of {minutes:g} minutes: kinds of things that grew",
            len(found["grew"]),
            "beyond what is allowed",
            goal="under 1 beyond what is allowed",
        ),
        *(
            Figure(
                f"soak: memory of the {who} at the end",
                end[f"{who}: memory, MiB"],
                "MiB",
                limit=warm[f"{who}: memory, MiB"],
                limit_name="after the warm-up",
            )
            for who in ("daemon", "clients")
        ),
        *(
            Figure(f"soak: {what} a second", done.get(what, 0) / seconds, "pages/s")
            for what in ("pages stored", "pages loaded")
        ),
        *(
            Figure(f"soak: {what}", done.get(what, 0), "times")
            for what in ("daemon restarts", "clients killed")
        ),
    ]
