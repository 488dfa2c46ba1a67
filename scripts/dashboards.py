"""Makes deploy/grafana/*.json, the dashboards for Grafana. Needs grafana-foundation-sdk; run
through `make dashboards`.

The output is committed, so that who loads it needs no program. `--check` writes nothing and fails
when what is committed is not what this says.

Two rules hold for every panel, and tests look after both: all of its metrics exist, and in a
healthy daemon each of its queries has data, also where nothing happens and tiers are off. Each
metric of the daemon is in one of the panels.
"""

from __future__ import annotations

import argparse
import sys
from itertools import count
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model

from dashboard_detail import DETAIL
from dashboard_overview import OVERVIEW
from dashboard_panels import SOURCE

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "deploy" / "grafana"

DASHBOARDS = {
    "kvwarehouse-overview": ("kvwarehouse", OVERVIEW),
    "kvwarehouse-detail": ("kvwarehouse, every metric", DETAIL),
}


def variable(name: str, label: str, says: str, query: str) -> dashboard.QueryVariable:
    """With all of its values chosen at first. `.*` lets series without the label in."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .description(says)
        .datasource(SOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(model.VariableOption(text="All", value="$__all"))
    )


def made(uid: str) -> str:
    """The dashboard as JSON."""
    title, rows = DASHBOARDS[uid]
    builder = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description("Made by scripts/dashboards.py.")
        .tags(["kvwarehouse"])
        .refresh("30s")
        .time("now-6h", "now")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .with_variable(
            variable(
                "namespace",
                "Kubernetes namespace",
                "Where Prometheus adds this label. It is not a namespace of kvwarehouse.",
                "label_values(kvwarehouse_state, namespace)",
            )
        )
        .with_variable(
            variable(
                "instance",
                "Daemon",
                "",
                'label_values(kvwarehouse_state{namespace=~"$namespace"}, instance)',
            )
        )
    )
    for other, (its_title, _) in DASHBOARDS.items():
        if other != uid:
            link = dashboard.DashboardLink(its_title).type(model.DashboardLinkType.LINK)
            builder.link(link.url(f"/d/{other}").keep_time(True).include_vars(True))
    numbers = count(1)
    for row, panels in rows.items():
        builder.with_row(dashboard.Row(row).id(next(numbers)))
        for panel in panels:
            builder.with_panel(panel.build(panel).id(next(numbers)))
    return JSONEncoder(sort_keys=True, indent=2).encode(builder.build()) + "\n"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="fail if the output would change")
    check = arguments.parse_args().check
    stale = False
    for uid in DASHBOARDS:
        path, text = TARGET / f"{uid}.json", made(uid)
        if not check:
            TARGET.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text("utf-8") != text:
            stale = True
            print(f"{path.relative_to(ROOT)} is not what scripts/ say: run `make dashboards`")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
