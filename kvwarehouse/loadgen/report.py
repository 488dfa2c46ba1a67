"""A drive of an engine, or of the daemon, as tables, plots and figures. Stateless; thread-safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvwarehouse.durations import format_duration
from kvwarehouse.loadgen.drive import Drive
from kvwarehouse.loadgen.histogram import Histogram
from kvwarehouse.loadgen.results import (
    ANSWERED,
    ASKED,
    FAILED,
    FIRST_S,
    HITS,
    LOADED_BYTES,
    REQUESTS,
    TIERS,
    TOKENS,
    DaemonResults,
    EngineResults,
)
from kvwarehouse.report.report import Plot, Report, Series, TableBlock
from kvwarehouse.sizes import format_size

# Beyond this an open loop was no longer the trace's.
_LATE_S = 0.1

_GIGABYTE = 1e9

_HITS = tuple(f"hit_{tier}" for tier in TIERS)
_COUNTS = ("asked", *_HITS, "loaded", "wrong", "stored", "already")


@dataclass(frozen=True)
class DriveFacts:
    """What was driven, and how."""

    engine: str
    source: str
    loop: str
    notes: Sequence[str] = field(default=())

    def figures(self, drive: Drive) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "source": self.source,
            "loop": self.loop,
            "elapsed_s": drive.elapsed_s,
            "was_interrupted": drive.interrupted,
            "notes": list(self.notes) + late_note(drive),
        }


def loop_rows(drive: Drive, facts: DriveFacts) -> list[tuple[str, Any]]:
    over = format_duration(drive.elapsed_s) + (", interrupted" if drive.interrupted else "")
    return [
        ("trace", facts.source),
        ("loop", facts.loop),
        ("over", over),
        ("started", drive.started),
    ]


def times_table(times: Mapping[str, Histogram]) -> TableBlock:
    rows = [
        (name, each.count, *(_milliseconds(value) for value in list(each.figures().values())[1:]))
        for name, each in times.items()
    ]
    columns = ("milliseconds", ">count", ">mean", ">p50", ">p90", ">p99", ">max")
    return TableBlock("Times", columns, rows)


def time_figures(times: Mapping[str, Histogram]) -> dict[str, Any]:
    return {name: each.figures() for name, each in times.items()}


def by_reason(title: str, counts: Mapping[str, int], details: Mapping[str, str]) -> TableBlock:
    most_first = sorted(counts.items(), key=lambda item: -item[1])
    rows = [(reason, count, _one_line(details.get(reason, ""))) for reason, count in most_first]
    return TableBlock(title, ("reason", ">count", "the first"), rows)


def failure_figures(counts: Mapping[str, int], details: Mapping[str, str]) -> dict[str, Any]:
    return {
        reason: {"count": count, "first": details.get(reason, "")}
        for reason, count in counts.items()
    }


def late_note(drive: Drive) -> list[str]:
    late_s = drive.late.percentile(99)
    if late_s is None or late_s < _LATE_S:
        return []
    return [
        f"One request in a hundred went out {format_duration(late_s)} or more after its time: all"
        " workers were busy, or this machine was. The load was lower than the trace's; raise"
        " --most-in-flight, or lower --speed."
    ]


def _milliseconds(seconds: float | int | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:,.4g}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:100]


def answers_report(answers: EngineResults, drive: Drive, facts: DriveFacts) -> Report:
    times = {
        "TTFT": answers.ttft,
        "ITL": answers.itl,
        "TPOT": answers.tpot,
        "whole answer": answers.whole,
    }
    late = {"sent late": drive.late} if drive.late.count else {}
    blocks: list[TableBlock | Plot] = [
        _answer_requests(answers, drive, facts),
        times_table(times | late),
    ]
    if answers.failures:
        blocks.append(by_reason("Failures", answers.failures, answers.details))
    blocks += _answer_plots(answers)
    rates = _answer_rates(answers, drive)
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


def _answer_rates(answers: EngineResults, drive: Drive) -> dict[str, float | None]:
    elapsed_s = drive.elapsed_s
    if not elapsed_s:
        return dict.fromkeys(("requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s"))
    prompt = answers.prompt_tokens / elapsed_s if answers.said_usage else None
    return {
        "requests_per_s": answers.answered / elapsed_s,
        "output_tokens_per_s": answers.output_tokens / elapsed_s,
        "prompt_tokens_per_s": prompt,
    }


def _cached_share(answers: EngineResults) -> float | None:
    """Of all prompt tokens, where the server says what was cached."""
    if not answers.said_cached or not answers.prompt_tokens:
        return None
    return answers.cached_tokens / answers.prompt_tokens


def _answer_requests(answers: EngineResults, drive: Drive, facts: DriveFacts) -> TableBlock:
    rates, share = _answer_rates(answers, drive), _cached_share(answers)
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


def _answer_plots(answers: EngineResults) -> list[TableBlock | Plot]:
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


def _notes(answers: EngineResults, drive: Drive, facts: DriveFacts) -> list[str]:
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


def pages_report(pages: DaemonResults, drive: Drive, facts: DriveFacts) -> Report:
    times = {"lookup": pages.lookup, "load": pages.load, "store": pages.store}
    late = {"sent late": drive.late} if drive.late.count else {}
    blocks: list[TableBlock | Plot] = [
        _page_requests(pages, drive, facts),
        _origins(pages),
        times_table(times | late),
    ]
    for title, counts in (("Not loaded", pages.missed), ("Not stored", pages.dropped)):
        if counts:
            blocks.append(by_reason(f"{title}, pages", counts, {}))
    if pages.failures:
        blocks.append(by_reason("Failures", pages.failures, pages.details))
    blocks += _page_plots(pages)
    summary = (
        f"{_share(pages, *_HITS):.1%} of {pages.counts['asked']:,} pages hit,"
        f" {pages.counts['wrong']:,} wrong; {pages.failed:,} requests failed."
    )
    figures = {
        **facts.figures(drive),
        "page_bytes": pages.page_bytes,
        "requests": {
            "started": drive.started,
            "served": pages.served,
            "failed": pages.failed,
            "interrupted": pages.interrupted,
        },
        "failures": failure_figures(pages.failures, pages.details),
        "pages": {name: pages.counts[name] for name in _COUNTS}
        | {"not_loaded": dict(pages.missed), "not_stored": dict(pages.dropped)},
        "hit_rate": _share(pages, *_HITS),
        "tiers": {tier: {"hit_rate": _share(pages, f"hit_{tier}")} for tier in TIERS},
        "rates": _page_rates(pages, drive),
        "seconds": time_figures(times | {"late": drive.late}),
    }
    notes = [
        "Hits are what a lookup finds in prefix order; loads are verified, and the mark of every"
        " page loaded is compared. Percentiles within 0.5 %.",
        *late_note(drive),
        *facts.notes,
    ]
    return Report(f"Drive of {facts.engine}", summary, blocks, figures, notes)


def _share(pages: DaemonResults, *names: str) -> float:
    asked = pages.counts["asked"]
    return sum(pages.counts[name] for name in names) / asked if asked else 0.0


def _page_rates(pages: DaemonResults, drive: Drive) -> dict[str, float | None]:
    """Bytes a second of load time are those of one thread that loads."""
    loaded, stored = (pages.counts[name] * pages.page_bytes for name in ("loaded", "stored"))
    return {
        "requests_per_s": pages.served / drive.elapsed_s if drive.elapsed_s else None,
        "loaded_bytes_per_s": loaded / drive.elapsed_s if drive.elapsed_s else None,
        "loaded_bytes_per_load_s": loaded / pages.load.sum_s if pages.load.sum_s else None,
        "stored_bytes_per_store_s": stored / pages.store.sum_s if pages.store.sum_s else None,
    }


def _page_requests(pages: DaemonResults, drive: Drive, facts: DriveFacts) -> TableBlock:
    rates = _page_rates(pages, drive)
    rows: list[tuple[str, Any]] = [
        *loop_rows(drive, facts),
        ("served", pages.served),
        ("failed", pages.failed),
        ("interrupted", pages.interrupted),
        ("page", format_size(pages.page_bytes)),
        ("requests/s", _number(rates["requests_per_s"])),
        ("loaded, GB/s", _gigabytes(rates["loaded_bytes_per_s"])),
        ("a load, GB/s", _gigabytes(rates["loaded_bytes_per_load_s"])),
        ("a store, GB/s", _gigabytes(rates["stored_bytes_per_store_s"])),
    ]
    return TableBlock("Requests", ("what", ">value"), rows)


def _origins(pages: DaemonResults) -> TableBlock:
    counts = pages.counts
    missed = counts["asked"] - pages.hits
    named = {
        "hbm": "hit in hbm",
        "dram": "hit in dram",
        "nvme": "hit on nvme",
        "remote": "probably in the store",
    }
    rows = [
        (name, counts[f"hit_{tier}"], f"{_share(pages, f'hit_{tier}'):.1%}")
        for tier, name in named.items()
        if tier in ("dram", "nvme") or counts[f"hit_{tier}"]
    ]
    rows += [
        ("missed", missed, f"{missed / counts['asked']:.1%}" if counts["asked"] else ""),
        ("asked", counts["asked"], ""),
        ("loaded", counts["loaded"], ""),
        ("wrong", counts["wrong"], ""),
        ("stored", counts["stored"], ""),
        ("stored before", counts["already"], ""),
    ]
    return TableBlock("Pages", ("what", ">pages", ">share"), rows)


def _page_plots(pages: DaemonResults) -> list[TableBlock | Plot]:
    if not pages.served:
        return []
    times = [("lookup", pages.lookup), ("load", pages.load), ("store", pages.store)]
    cumulative = [Series(name, each.shares()) for name, each in times if each.count]
    at = "seconds since the start"
    timeline = pages.timeline
    loaded = [(end_s, rate / _GIGABYTE) for end_s, rate in timeline.rates(LOADED_BYTES)]
    return [
        Plot("How long it took", "seconds", "share up to there", cumulative, log_x=True),
        Plot("Hits", at, "share of pages", [Series("hits", timeline.means(HITS, ASKED))]),
        Plot("Loaded", at, "GB/s", [Series("loaded", loaded)]),
        Plot("Requests", at, "requests/s", [Series("served", timeline.rates(REQUESTS))]),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def _gigabytes(value: float | None) -> str:
    return "" if value is None else f"{value / _GIGABYTE:,.3g}"
