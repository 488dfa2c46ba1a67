"""How findings are printed: a table for people, one JSON object for programs. To stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvwarehouse.host import Finding, Verdict, healthy

_PIPE_COLUMNS = 120
_ENDS = {"host": ("can serve", "cannot serve yet")}
_STYLES = {
    Verdict.OK: "green",
    Verdict.WARN: "yellow",
    Verdict.FAIL: "bold red",
    Verdict.SKIP: "dim",
}


def print_json(engine: str, findings: Sequence[Finding]) -> None:
    answer = {
        "engine": engine,
        "ok": healthy(findings),
        "checks": [asdict(finding) for finding in findings],
    }
    json.dump(answer, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_table(engine: str, findings: Sequence[Finding]) -> None:
    # Text, not markup: what was found may have square brackets.
    out = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("verdict", "check", "what"):
        table.add_column(column, no_wrap=column != "what", overflow="fold")
    for finding in findings:
        what = Text(finding.what)
        if finding.fix:
            what.append("\n-> ", style="bold").append(finding.fix)
        verdict = Text(finding.verdict.value, style=_STYLES[finding.verdict])
        table.add_row(verdict, Text(finding.check), what)
    out.print(table)
    out.print(_summary(engine, findings))


def _summary(engine: str, findings: Sequence[Finding]) -> Text:
    counts = {verdict: sum(f.verdict is verdict for f in findings) for verdict in Verdict}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    good, bad = _ENDS.get(engine, ("can be served", "cannot be served yet"))
    end = good if healthy(findings) else bad
    return Text(f"\n{engine} {end}: {told}", style="bold")
