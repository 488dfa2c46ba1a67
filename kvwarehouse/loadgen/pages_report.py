"""A drive of the daemon as tables, plots and figures. Stateless; thread-safe."""

from __future__ import annotations

from typing import Any

from kvwarehouse.loadgen.drive import Drive
from kvwarehouse.loadgen.pages import ASKED, HITS, LOADED_BYTES, REQUESTS, Pages
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
from kvwarehouse.sizes import format_size

_GIGABYTE = 1e9


def pages_report(pages: Pages, drive: Drive, facts: Facts) -> Report:
    times = {"lookup": pages.lookup, "load": pages.load, "store": pages.store}
    late = {"sent late": drive.late} if drive.late.count else {}
    blocks: list[TableBlock | Plot] = [
        _requests(pages, drive, facts),
        _origins(pages),
        times_table(times | late),
    ]
    for title, counts in (("Not loaded", pages.missed), ("Not stored", pages.dropped)):
        if counts:
            blocks.append(by_reason(f"{title}, pages", counts, {}))
    if pages.failures:
        blocks.append(by_reason("Failures", pages.failures, pages.details))
    blocks += _plots(pages)
    summary = (
        f"{_share(pages, 'hit_dram', 'hit_nvme'):.1%} of {pages.counts['asked']:,} pages hit,"
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
        "hit_rate": _share(pages, "hit_dram", "hit_nvme"),
        "tiers": {tier: {"hit_rate": _share(pages, f"hit_{tier}")} for tier in ("dram", "nvme")},
        "rates": _rates(pages, drive),
        "seconds": time_figures(times | {"late": drive.late}),
    }
    notes = [
        "Hits are what a lookup finds in prefix order; loads are verified, and the mark of every"
        " page loaded is compared. Percentiles within 0.5 %.",
        *late_note(drive),
        *facts.notes,
    ]
    return Report(f"Drive of {facts.engine}", summary, blocks, figures, notes)


_COUNTS = ("asked", "hit_dram", "hit_nvme", "loaded", "wrong", "stored", "already")


def _share(pages: Pages, *names: str) -> float:
    asked = pages.counts["asked"]
    return sum(pages.counts[name] for name in names) / asked if asked else 0.0


def _rates(pages: Pages, drive: Drive) -> dict[str, float | None]:
    """Bytes a second of load time are those of one thread that loads."""
    loaded, stored = (pages.counts[name] * pages.page_bytes for name in ("loaded", "stored"))
    return {
        "requests_per_s": pages.served / drive.elapsed_s if drive.elapsed_s else None,
        "loaded_bytes_per_s": loaded / drive.elapsed_s if drive.elapsed_s else None,
        "loaded_bytes_per_load_s": loaded / pages.load.sum_s if pages.load.sum_s else None,
        "stored_bytes_per_store_s": stored / pages.store.sum_s if pages.store.sum_s else None,
    }


def _requests(pages: Pages, drive: Drive, facts: Facts) -> TableBlock:
    rates = _rates(pages, drive)
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


def _origins(pages: Pages) -> TableBlock:
    counts = pages.counts
    missed = counts["asked"] - counts["hit_dram"] - counts["hit_nvme"]
    rows = [
        ("hit in dram", counts["hit_dram"], f"{_share(pages, 'hit_dram'):.1%}"),
        ("hit on nvme", counts["hit_nvme"], f"{_share(pages, 'hit_nvme'):.1%}"),
        ("missed", missed, f"{missed / counts['asked']:.1%}" if counts["asked"] else ""),
        ("asked", counts["asked"], ""),
        ("loaded", counts["loaded"], ""),
        ("wrong", counts["wrong"], ""),
        ("stored", counts["stored"], ""),
        ("stored before", counts["already"], ""),
    ]
    return TableBlock("Pages", ("what", ">pages", ">share"), rows)


def _plots(pages: Pages) -> list[TableBlock | Plot]:
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
