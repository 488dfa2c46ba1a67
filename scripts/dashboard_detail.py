"""What is on the dashboard of details: each metric of the daemon."""

from __future__ import annotations

from dashboard_overview import HEALTH, HIT, MISSED
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
    fullness,
    metric,
    names_only,
    several,
    where_on,
)

DETAIL = {
    "Daemons": [
        HEALTH,
        Panel(
            "Who they are",
            "Name, version and identity.",
            NUMBER,
            [
                Line(
                    f"count by (instance, name, version, warehouse_id) ({metric('info')})",
                    "{{instance}}: {{name}} {{version}}",
                )
            ],
            width=8,
            build=names_only,
        ),
        by_daemon("Time since the start", SECONDS, "uptime_seconds"),
        several("Starts", NUMBER, "It rises with every start.", start="incarnation"),
        several("The last start", SECONDS, "How long its recovery took.", took="recovery_seconds"),
        by_daemon("Found by the last start", PAGES, "recovered_pages", "tier"),
    ],
    "Lookups and loads": [
        several(
            "Calls", CALLS_PER_S, "Lookups and loads.", lookups="lookups_total", loads="loads_total"
        ),
        by_daemon("Pages found", PAGES_PER_S, HIT, "tier", "By the fastest tier that had them."),
        by_daemon("Pages missed", PAGES_PER_S, MISSED),
        several(
            "Pages loaded",
            SHARDS_PER_S,
            "Shards of pages that were loaded and verified, and those of them from HBM, or read "
            "from the remote store for it.",
            all="loaded_pages_total",
            from_HBM="loaded_hbm_pages_total",
            from_store="loaded_remote_pages_total",
        ),
        by_daemon("Bytes loaded", BYTES_PER_S, "loaded_bytes_total"),
        by_daemon("Found, and not loaded", SHARDS_PER_S, "load_failed_pages_total", "reason"),
    ],
    "Stores": [
        by_daemon("Calls", CALLS_PER_S, "stores_total"),
        by_daemon("Pages", PAGES_PER_S, "sealed_pages_total"),
        several(
            "Shards of pages",
            SHARDS_PER_S,
            "New ones, and those that were there. What is dropped is of them.",
            stored="stored_shards_total",
            already_there="store_already_pages_total",
        ),
        by_daemon("Bytes", BYTES_PER_S, "sealed_bytes_total"),
        by_daemon(
            "Stored again, by why it had left",
            PAGES_PER_S,
            "stored_again_pages_total",
            "left",
            says="Pages that engines computed a second time, or that came back from the remote "
            "store: more memory would have kept what was evicted or reclaimed.",
        ),
        by_daemon("Dropped", SHARDS_PER_S, "store_dropped_pages_total", "reason"),
        by_daemon(
            "Not put on NVMe at once", PAGES_PER_S, "nvme_not_admitted_pages_total", "reason"
        ),
        several(
            "Damage",
            PAGES_PER_S,
            "Loads, records and copies of other bytes than were stored, and pages taken out for "
            "it.",
            loads="digest_mismatches_total",
            NVMe="nvme_mismatches_total",
            HBM="hbm_mismatches_total",
            taken_out="quarantined_pages_total",
        ),
    ],
    "Tiers and index": [
        Panel(
            "How full",
            "A full tier is as it should be.",
            SHARE,
            [Line(fullness("instance, tier"), "{{instance}} {{tier}}")],
        ),
        by_daemon("Pages", PAGES, "tier_pages", "tier"),
        several(
            "Index",
            PAGES,
            "A full index beside tiers that are not is too small. Orphans are pages with a gap "
            "before them, and go.",
            in_use="index_pages",
            room="index_capacity_pages",
            orphans="orphan_pages",
        ),
        by_daemon("Left DRAM", PAGES_PER_S, "dram_left_pages_total", "reason"),
        by_daemon("Left NVMe", PAGES_PER_S, "nvme_left_pages_total", "reason"),
        by_daemon(
            "Released by clients",
            PAGES_PER_S,
            "released_pages_total",
            says="Pages of conversations that are over: they leave before others.",
        ),
        several(
            "Kept",
            BYTES,
            "Pages that stay until a time, as operators and requests wished.",
            kept="kept_bytes",
            room="keep_capacity_bytes",
        ),
        several(
            "Keeps",
            NUMBER,
            "Prompts that are kept, and their pages.",
            keeps="keeps",
            pages="kept_pages",
        ),
        by_daemon("Slots of DRAM, without those of pages", NUMBER, "dram_slots", "state"),
        by_daemon("Memory behind the arena", BYTES, "dram_populated_bytes"),
        by_daemon("Namespaces", NUMBER, "namespaces"),
        by_daemon("Evicted keys that the ledger keeps down", NUMBER, "ledger_tombstones"),
    ],
    "NVMe": [
        by_daemon("Health", NUMBER, "nvme_health", "health", "The one that is 1."),
        several(
            "Waiting to be written",
            BYTES,
            "What nobody has if the host loses power now.",
            waiting="nvme_queue_bytes",
        ),
        several(
            "On their way",
            NUMBER,
            "Records that wait to be written, that are being read, and pages on their way to DRAM.",
            to_write="nvme_queue_records",
            reads="nvme_reads_in_flight",
            to_DRAM="nvme_promotions_in_flight",
        ),
        by_daemon("Bytes written", BYTES_PER_S, "nvme_written_bytes_total", "why"),
        several(
            "Write budget",
            BYTES,
            "What NVMe may write a day, and what is left of a day's worth: below half of it new "
            "pages stay in DRAM.",
            a_day="nvme_write_budget_bytes",
            left="nvme_write_budget_left_bytes",
        ),
        by_daemon("Records written", "count:records/s", "nvme_written_records_total", "why"),
        by_daemon("Bytes read", BYTES_PER_S, "nvme_read_bytes_total"),
        several(
            "Records read",
            "count:records/s",
            "And those of them that went to DRAM.",
            read="nvme_read_records_total",
            to_DRAM="nvme_promoted_pages_total",
        ),
        by_daemon("Segments", NUMBER, "nvme_segments", "use"),
        several(
            "Recycled",
            "count:a second",
            "Segments, and records gone with them.",
            segments="nvme_reclaimed_segments_total",
            records="nvme_dropped_records_total",
        ),
        by_daemon("Errors", "count:errors/s", "nvme_errors_total", "operation"),
        by_daemon("Flushes", "count:flushes/s", "nvme_flushes_total"),
        by_daemon(
            "Processor time for digests of what is read",
            SHARE,
            "nvme_read_digest_seconds_total",
            says="Of one core.",
        ),
    ],
    "HBM": [
        by_daemon("Health", NUMBER, "hbm_health", "health", "The one that is 1."),
        several(
            "Copied",
            PAGES_PER_S,
            "From DRAM into the memory of a GPU.",
            copied="hbm_promoted_pages_total",
        ),
        by_daemon("Bytes copied", BYTES_PER_S, "hbm_promoted_bytes_total"),
        by_daemon("Left HBM", PAGES_PER_S, "hbm_left_pages_total", "reason"),
        several(
            "On their way",
            PAGES,
            "To be copied; and places of copies that were dropped and that somebody may still "
            "read.",
            to_copy="hbm_queued_pages",
            leaving="hbm_leaving_places",
        ),
    ],
    "Remote tier": [
        where_on(by_daemon("State", NUMBER, "remote_state", "state", "The one that is 1.")),
        several(
            "Runs on their way",
            NUMBER,
            "Runs of pages that wait in the daemon, and those that its worker has.",
            waiting="remote_queued_runs",
            under_way="remote_runs_under_way",
        ),
        several(
            "Runs queued",
            RUNS_PER_S,
            "All, and of them those that the store had of an earlier day.",
            queued="remote_offered_runs_total",
            refreshes="remote_refresh_runs_total",
        ),
        by_daemon("Runs dropped", RUNS_PER_S, "remote_dropped_runs_total", "reason"),
        where_on(
            by_daemon(
                "Puts",
                RUNS_PER_S,
                "remote_puts_total",
                "result",
                "Runs that were taken from the queue, by what became of them.",
            )
        ),
        where_on(by_daemon("Bytes put", BYTES_PER_S, "remote_put_bytes_total")),
        several(
            "Reads on their way",
            NUMBER,
            "Runs of pages that loads wait for: in the daemon, and read by its worker.",
            waiting="remote_fetch_queued_runs",
            under_way="remote_fetch_runs_under_way",
        ),
        by_daemon("Bytes on their way", BYTES, "remote_fetch_bytes_under_way"),
        several(
            "Reads asked for",
            RUNS_PER_S,
            "By loads; those that were on their way already; and answers that too much was.",
            asked="remote_fetch_asked_runs_total",
            joined="remote_fetch_joined_runs_total",
            later="remote_fetch_later_runs_total",
        ),
        by_daemon(
            "Reads",
            RUNS_PER_S,
            "remote_fetches_total",
            "end",
            "Runs of pages that loads asked for, by how that ended.",
        ),
        where_on(
            by_daemon(
                "Gets",
                RUNS_PER_S,
                "remote_gets_total",
                "result",
                "Of these, what the worker took, by what became of it.",
            )
        ),
        where_on(by_daemon("Bytes read", BYTES_PER_S, "remote_get_bytes_total")),
        where_on(
            by_daemon(
                "Damaged objects",
                "count:objects/s",
                "remote_damaged_objects_total",
                "fault",
                "By the first thing that was not as it should be. Nobody got their pages.",
            )
        ),
        where_on(
            by_daemon(
                "Speed of reads",
                BYTES_PER_S,
                "remote_read_bytes_per_second",
                says="While something is read. 0: nothing was in the last minute.",
            )
        ),
        where_on(by_daemon("Until its first byte", SECONDS, "remote_first_byte_seconds")),
        where_on(
            by_daemon(
                "Age of what is known of clears",
                SECONDS,
                "remote_epochs_age_seconds",
                says="Above 10 nothing is read. -1: nothing is known.",
            )
        ),
        where_on(
            by_daemon(
                "Clears that the store does not know of",
                NUMBER,
                "remote_epochs_owed",
                says="Other hosts may serve what was cleared here.",
            )
        ),
        where_on(
            by_daemon(
                "Objects",
                NUMBER,
                "remote_objects",
                says="Of the whole fleet, as each daemon knows of them.",
            )
        ),
        where_on(by_daemon("Objects deleted", "count:objects/s", "remote_deleted_objects_total")),
        where_on(
            by_daemon(
                "Daemons of the fleet",
                NUMBER,
                "remote_nodes",
                says="That wrote to the store within 5 minutes, as each daemon sees them.",
            )
        ),
        where_on(
            several(
                "What failed",
                "count:a second",
                "Times when too many calls had failed, and starts of the worker.",
                breaker_opened="remote_breaker_opened_total",
                worker_started="remote_worker_starts_total",
            )
        ),
    ],
    "Clients and calls": [
        several(
            "Clients",
            NUMBER,
            "Of this host: the ranks of engines, and the daemon's own for gRPC.",
            connected="connections",
            sessions="sessions",
        ),
        by_daemon("Pages pinned", NUMBER, "pins", says="Slots and extents that clients hold."),
        several(
            "Pins",
            "count:pins/s",
            "Taken, and refused by their bound.",
            taken="pins_taken_total",
            refused="pins_refused_total",
        ),
        several(
            "Connections of --listen",
            NUMBER,
            "And the most that it takes, 0 without --listen.",
            now="grpc_connections",
            most="grpc_connections_max",
        ),
        by_daemon("Stores and loads over gRPC under way", NUMBER, "streams"),
        by_daemon("Memory of those", BYTES, "staging_bytes"),
        by_daemon("Calls refused", CALLS_PER_S, "refused_calls_total", "reason"),
        by_daemon("State", NUMBER, "state", "state", "The one that is 1."),
        by_daemon("Problems", NUMBER, "problems"),
        by_daemon("Ledger", NUMBER, "ledger_health", "health", "The one that is 1."),
    ],
    "KV events": [
        where_on(by_daemon("Batches", "count:batches/s", "kv_event_batches_total")),
        where_on(by_daemon("Blocks", "count:blocks/s", "kv_event_blocks_total", "change")),
        where_on(by_daemon("Replays", "count:replays/s", "kv_event_replays_total", "answer")),
        where_on(
            several(
                "Lost",
                "count:a second",
                "Times when all was said anew, and connections that were ended.",
                said_anew="kv_event_losses_total",
                ended="kv_event_ended_peers_total",
            )
        ),
        several(
            "Events of the core that were lost",
            "count:events/s",
            "Nobody took them in time; the log and routers may lack something.",
            lost="events_dropped_total",
        ),
    ],
}
