"""What is on the overview: whether all is well, and what it brings."""

from __future__ import annotations

from dashboard_panels import (
    BYTES,
    BYTES_PER_S,
    CALLS_PER_S,
    NUMBER,
    PAGES,
    PAGES_PER_S,
    RUNS_PER_S,
    SECONDS,
    SHARDS_PER_S,
    SHARE,
    Line,
    Panel,
    by_daemon,
    filled,
    fullness,
    good_or_not,
    grown,
    holds,
    metric,
    number_above_zero_is_bad,
    or_zero,
    piled,
    rate,
    share_or_idle,
    shares,
    tile,
    total,
    where_on,
)

HIT = "lookup_hit_pages_total"
MISSED = "lookup_missed_pages_total"
INCARNATION = metric("incarnation")
ASKED = f"({grown(HIT)} + {grown(MISSED)})"

HEALTH = Panel(
    "Health",
    "Green: it serves, tiers that were asked for work, clears and evictions are durable, and "
    "nobody removed its files. A gap: no answer.",
    NUMBER,
    [
        Line(holds("state", "state", "serving"), "{{instance}} serves"),
        Line(holds("nvme_health", "health", "ok|off"), "{{instance}} NVMe"),
        Line(holds("hbm_health", "health", "ok|off|starting"), "{{instance}} HBM"),
        Line(
            f"{holds('remote_state', 'state', 'serving|starting|full')}"
            f" or on (instance) {holds('state', 'state', '.+')}",
            "{{instance}} remote tier",
        ),
        Line(holds("ledger_health", "health", "ok|rebuilt"), "{{instance}} ledger"),
        Line(f"1 - max by (instance) ({metric('paths_lost')})", "{{instance}} files"),
    ],
    width=24,
    height=8,
    build=good_or_not,
)

WHERE_FOUND = Panel(
    "Where the pages asked for were found",
    "Shares of the pages that lookups asked for, by the fastest tier that had them. What is not "
    "missed engines need not compute.",
    PAGES_PER_S,
    [
        Line(total(rate(HIT), "tier"), "{{tier}}"),
        Line(total(rate(MISSED)), "missed"),
    ],
    build=shares,
)

LOADED = piled(
    by_daemon(
        "Loaded instead of computed",
        BYTES_PER_S,
        "loaded_bytes_total",
        says="KV that clients loaded and verified.",
    )
)

OVERVIEW = {
    "Is it healthy?": [
        tile(
            "Daemons",
            "That answer Prometheus.",
            NUMBER,
            f"count({metric('info')})",
        ),
        tile(
            "Alerts",
            "Of kvwarehouse.rules.yml that fire now; 0 where those are not loaded.",
            NUMBER,
            'count(ALERTS{alertname=~"Kvwarehouse.+",alertstate="firing",instance=~"$instance"})'
            " or vector(0)",
            build=number_above_zero_is_bad,
        ),
        tile(
            "Starts",
            "Of daemons, within the range shown.",
            NUMBER,
            total(f"{INCARNATION} - min_over_time({INCARNATION}[$__range])"),
        ),
        tile(
            "Hit rate",
            "Pages found, of those that lookups asked for within the range shown.",
            SHARE,
            f"{grown(HIT)} / {ASKED}",
            build=share_or_idle,
        ),
        tile(
            "Loaded",
            "KV that engines loaded in place of computing it, within the range shown.",
            BYTES,
            grown("loaded_bytes_total"),
        ),
        tile(
            "Clients",
            "Connected to the local sockets: the ranks of engines, and the daemons' own for gRPC.",
            NUMBER,
            total(metric("connections")),
        ),
        HEALTH,
    ],
    "What does it hit, and what does that save?": [
        WHERE_FOUND,
        LOADED,
        Panel(
            "Found, and not loaded",
            "Shards of pages, by reason. stale: it left between lookup and load. timeout: it came "
            "too late. mismatch: it was damaged.",
            SHARDS_PER_S,
            [Line(total(rate("load_failed_pages_total"), "reason"), "{{reason}}")],
        ),
    ],
    "What is stored, what is dropped and why?": [
        Panel(
            "Stored",
            "Shards of pages that are new, and those that somebody had stored before.",
            SHARDS_PER_S,
            [
                Line(total(rate("stored_shards_total")), "stored"),
                Line(total(rate("store_already_pages_total")), "already there"),
            ],
        ),
        Panel(
            "Dropped by stores",
            "Shards of pages, by the reason that their callers were told.",
            SHARDS_PER_S,
            [Line(total(rate("store_dropped_pages_total"), "reason"), "{{reason}}")],
        ),
        Panel(
            "Calls and pins refused",
            "Calls from other hosts by reason, and pins beyond a client's share.",
            CALLS_PER_S,
            [
                Line(total(rate("refused_calls_total"), "reason"), "{{reason}}"),
                Line(total(rate("pins_refused_total")), "pins"),
            ],
        ),
    ],
    "Is it full?": [
        Panel(
            "How full",
            "Tiers of all daemons, and the index. A full tier is as it should be: the coldest "
            "pages leave. A full index beside tiers that are not is too small.",
            SHARE,
            [
                Line(fullness("tier"), "{{tier}}"),
                Line(
                    f"{total(metric('index_pages'))} / {total(metric('index_capacity_pages'))}",
                    "index",
                ),
            ],
            build=filled,
        ),
        Panel(
            "Pages",
            "In each tier; one in two counts in both.",
            PAGES,
            [Line(total(metric("tier_pages"), "tier"), "{{tier}}")],
        ),
        Panel(
            "Pages that left",
            "Of all reasons. From DRAM most are on NVMe still, if there is such a tier.",
            PAGES_PER_S,
            [
                Line(total(rate("dram_left_pages_total")), "dram"),
                Line(total(rate("nvme_left_pages_total")), "nvme"),
                Line(total(rate("hbm_left_pages_total")), "hbm"),
            ],
        ),
    ],
    "Remote tier: does the store take what is hot, and give it back?": [
        piled(
            where_on(
                by_daemon(
                    "Put into the store",
                    BYTES_PER_S,
                    "remote_put_bytes_total",
                    says="Bytes of objects that the store took, of all daemons.",
                )
            )
        ),
        Panel(
            "Runs, by what became of them",
            "A run of pages becomes one object. already, refreshed: it was there. failed: the "
            "store did not take it. no_room: the capacity of the fleet is used. not_in_dram: its "
            "pages left before it was their turn.",
            RUNS_PER_S,
            [
                Line(
                    f"{total(rate('remote_puts_total'), 'result')}"
                    f" or on () 0 * {total(metric('uptime_seconds'))}",
                    "{{result}}",
                )
            ],
        ),
        Panel(
            "Waiting, and dropped",
            "Runs that wait for their turn, and those a second that the worker was not given: the "
            "queue was full, a page is too large, or had left DRAM when its turn came.",
            NUMBER,
            [
                Line(total(metric("remote_queued_runs"), "instance"), "{{instance}} waiting"),
                Line(total(rate("remote_dropped_runs_total"), "reason"), "dropped: {{reason}}"),
            ],
        ),
        piled(
            where_on(
                by_daemon(
                    "Read from the store",
                    BYTES_PER_S,
                    "remote_get_bytes_total",
                    says="Bytes of objects that loads waited for, of all daemons.",
                )
            )
        ),
        Panel(
            "Reads, by what became of them",
            "filled: its pages are in DRAM. missing: the store does not have it. late: nobody "
            "waited any longer. failed: the store did not give it. damaged: it was not what its "
            "name says, and nobody got it.",
            RUNS_PER_S,
            [Line(total(rate("remote_fetches_total"), "end"), "{{end}}")],
        ),
        Panel(
            "Until the store begins to answer",
            "To the first byte of an object. 0: nothing was read in the last minute.",
            SECONDS,
            [
                Line(
                    or_zero(f"max by (instance) ({metric('remote_first_byte_seconds')})"),
                    "{{instance}}",
                )
            ],
        ),
    ],
    "Is NVMe sick, or behind? Is anything damaged?": [
        Panel(
            "Read and written",
            "Bytes between NVMe and DRAM.",
            BYTES_PER_S,
            [
                Line(total(rate("nvme_read_bytes_total")), "read"),
                Line(total(rate("nvme_written_bytes_total"), "why"), "written: {{why}}"),
            ],
        ),
        Panel(
            "Waiting to be written",
            "What nobody has if the host loses power now. Where it stays at its bound, the disk "
            "is slower than what is stored.",
            BYTES,
            [Line(total(metric("nvme_queue_bytes"), "instance"), "{{instance}}")],
        ),
        Panel(
            "Errors, refusals and damage",
            "Failed operations of disks; pages that were not put on NVMe at once; copies that were "
            "damaged, and were not returned.",
            "count:a second",
            [
                Line(total(rate("nvme_errors_total"), "operation"), "error: {{operation}}"),
                Line(
                    total(rate("nvme_not_admitted_pages_total"), "reason"),
                    "not written: {{reason}}",
                ),
                Line(total(rate("quarantined_pages_total")), "damaged"),
            ],
        ),
    ],
}
