"""A drive of an engine as tables, plots and figures. Stateless; thread-safe."""

from __future__ import annotations

from typing import Any

from kvwarehouse.loadgen.answers import ANSWERED, FAILED, FIRST_S, TOKENS, Answers
from kvwarehouse.loadgen.drive import Drive
from kvwarehouse.loadgen.reporting import (
    Facts,
    by_reason,
    failure_figures,
    late_note,
    loop_rows,
    time_figures,
    times_table,
)
from kvwarehouse.report.report import Plot, Report, Series, TableBlock


def answers_report(answers: Answers, drive: Drive, facts: Facts) -> Report:
    times = {
        "TTFT": answers.ttft,
        "ITL": answers.itl,
        "TPOT": answers.tpot,
        "whole answer": answers.whole,
    }
    late = {"sent late": drive.late} if drive.late.count else {}
    blocks: list[TableBlock | Plot] = [_requests(answers, drive, facts), times_table(times | late)]
    if answers.failures:
        blocks.append(by_reason("Failures", answers.failures, answers.details))
    blocks += _plots(answers)
    rates = _rates(answers, drive)
    summary = (
        f"{answers.answered:,} answered, {answers.failed:,} failed,"
        f" {answers.interrupted:,} interrupted; {_rate(rates['output_tokens_per_s'])} output"
        " tokens/s."
    )
    figures = {
        **facts.figures(drive),
        "requests": {
            "started": drive.started,
            "answered": answers.answered,
            "failed": answers.failed,
            "interrupted": answers.interrupted,
            "short": answers.short,
        },
        "failures": failure_figures(answers.failures, answers.details),
        "seconds": time_figures(
            {
                "ttft": answers.ttft,
                "itl": answers.itl,
                "tpot": answers.tpot,
                "whole": answers.whole,
                "late": drive.late,
            }
        ),
        "rates": rates,
        "tokens": {
            "output": answers.output_tokens,
            "prompt": answers.prompt_tokens if answers.said_usage else None,
            "cached": answers.cached_tokens if answers.said_cached else None,
            "cached_share": _cached_share(answers),
        },
    }
    return Report(
        f"Drive of {facts.engine}", summary, blocks, figures, _notes(answers, drive, facts)
    )


def _rates(answers: Answers, drive: Drive) -> dict[str, float | None]:
    elapsed_s = drive.elapsed_s
    if not elapsed_s:
        return dict.fromkeys(("requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s"))
    prompt = answers.prompt_tokens / elapsed_s if answers.said_usage else None
    return {
        "requests_per_s": answers.answered / elapsed_s,
        "output_tokens_per_s": answers.output_tokens / elapsed_s,
        "prompt_tokens_per_s": prompt,
    }


def _cached_share(answers: Answers) -> float | None:
    """Of all prompt tokens, where the server says what was cached."""
    if not answers.said_cached or not answers.prompt_tokens:
        return None
    return answers.cached_tokens / answers.prompt_tokens


def _requests(answers: Answers, drive: Drive, facts: Facts) -> TableBlock:
    rates, share = _rates(answers, drive), _cached_share(answers)
    rows: list[tuple[str, Any]] = [
        *loop_rows(drive, facts),
        ("answered", answers.answered),
        ("failed", answers.failed),
        ("interrupted", answers.interrupted),
        ("answers shorter than asked for", answers.short),
        ("requests/s", _rate(rates["requests_per_s"])),
        ("output tokens", answers.output_tokens),
        ("output tokens/s", _rate(rates["output_tokens_per_s"])),
        ("prompt tokens/s", _rate(rates["prompt_tokens_per_s"])),
        ("prompt tokens cached", "not said" if share is None else f"{share:.1%}"),
    ]
    return TableBlock("Requests", ("what", ">value"), rows)


def _plots(answers: Answers) -> list[TableBlock | Plot]:
    cumulative = [
        Series(name, histogram.shares())
        for name, histogram in (
            ("TTFT", answers.ttft),
            ("ITL", answers.itl),
            ("TPOT", answers.tpot),
        )
        if histogram.count
    ]
    if not cumulative:
        return []
    timeline = answers.timeline
    return [
        Plot("How long it took", "seconds", "share up to there", cumulative, log_x=True),
        Plot(
            "Mean time to first token",
            "seconds since the start",
            "seconds",
            [Series("TTFT, by the end of the request", timeline.means(FIRST_S, ANSWERED))],
        ),
        Plot(
            "Output",
            "seconds since the start",
            "tokens/s",
            [Series("of requests that ended then", timeline.rates(TOKENS))],
        ),
        Plot(
            "Requests",
            "seconds since the start",
            "requests/s",
            [
                Series("answered", timeline.rates(ANSWERED)),
                Series("failed", timeline.rates(FAILED)),
            ],
        ),
    ]


def _notes(answers: Answers, drive: Drive, facts: Facts) -> list[str]:
    notes = [
        "TTFT from before the connection is made to the first token; ITL between arrivals of"
        " tokens; TPOT (last - first token) / (tokens - 1) of each answer.",
        "Percentiles within 0.5 %. Failed and interrupted requests have no times and no tokens.",
        *late_note(drive),
        *facts.notes,
    ]
    if answers.said_usage < answers.answered:
        missing = answers.answered - answers.said_usage
        notes.append(
            f"{missing:,} answers came without usage: their tokens are counted by arrivals."
        )
    return notes


def _rate(value: float | None) -> str:
    return "not said" if value is None else f"{value:,.4g}"
