"""The kinds of panels of our dashboards, and the queries in them: what is the same in all of them
stands here once. `dashboard_overview.py` and `dashboard_detail.py` have the panels themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, stat, statetimeline
from grafana_foundation_sdk.builders import timeseries as timeseries_panel
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as model

# Metrics are called kvwarehouse_NAME; the variables choose among daemons.
CHOSEN = 'instance=~"$instance",namespace=~"$namespace"'
SOURCE = shapes.DataSourceRef(type_val="prometheus", uid="${datasource}")

# Grafana's names of units; count: is one of our own, with K and M before it.
BYTES, BYTES_PER_S, SECONDS, SHARE, NUMBER = "bytes", "binBps", "s", "percentunit", "short"
PAGES, PAGES_PER_S, CALLS_PER_S = "count:pages", "count:pages/s", "count:calls/s"
RUNS_PER_S, SHARDS_PER_S = "count:runs/s", "count:shards/s"


# --- queries


def metric(name: str, labels: str = "") -> str:
    return f"kvwarehouse_{name}{{{CHOSEN}{',' if labels else ''}{labels}}}"


def rate(name: str, labels: str = "") -> str:
    return f"rate({metric(name, labels)}[$__rate_interval])"


def total(value: str, by: str = "") -> str:
    return f"sum by ({by}) ({value})" if by else f"sum({value})"


def grown(name: str) -> str:
    """Over the dashboard's range."""
    return f"sum(increase({metric(name)}[$__range]))"


def holds(name: str, label: str, values: str) -> str:
    """1 where the text is one of `values`, by daemon."""
    chosen = f'{label}=~"{values}"'
    return f"max by (instance) ({metric(name, chosen)})"


def or_zero(value: str) -> str:
    """0 for daemons that do not have it at all."""
    return f"{value} or on (instance) 0 * {total(metric('uptime_seconds'), 'instance')}"


def fullness(by: str) -> str:
    used, capacity = metric("tier_used_bytes"), metric("tier_capacity_bytes")
    return f"{total(used, by)} / ({total(capacity, by)} > 0)"


# --- panels


@dataclass(frozen=True)
class Line:
    query: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """`width`: of 24 columns. `says`: what it is, for the i in its corner."""

    title: str
    says: str
    unit: str
    lines: Sequence[Line]
    width: int = 8
    height: int = 7
    build: Callable[[Panel], Any] = field(default=lambda panel: curves(panel))

    def on(self, builder: Any) -> Any:
        """`builder` with what panels of all kinds have."""
        instant = not isinstance(builder, timeseries_panel.Panel | statetimeline.Panel)
        for number, line in enumerate(self.lines):
            query = Dataquery().expr(line.query).legend_format(line.legend)
            query = query.datasource(SOURCE).ref_id(chr(ord("A") + number))
            builder.with_target(query.instant() if instant else query.range())
        return (
            builder.title(self.title)
            .description(self.says)
            .unit(self.unit)
            .datasource(SOURCE)
            .span(self.width)
            .height(self.height)
        )


def curves(panel: Panel) -> Any:
    return _curves(panel)


def stacked(panel: Panel) -> Any:
    return _curves(panel, fill=40).stacking(_stacking(shapes.StackingMode.NORMAL))


def shares(panel: Panel) -> Any:
    """Each line's share of all of them."""
    return _curves(panel, fill=40).stacking(_stacking(shapes.StackingMode.PERCENT))


def _curves(panel: Panel, fill: float = 10) -> timeseries_panel.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(shapes.LegendDisplayMode.LIST)
        .placement(shapes.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    tooltip = (
        common.VizTooltipOptions()
        .mode(shapes.TooltipDisplayMode.MULTI)
        .sort(shapes.SortOrder.DESCENDING)
    )
    made: timeseries_panel.Panel = panel.on(timeseries_panel.Panel())
    return made.min(0).fill_opacity(fill).line_width(1).legend(legend).tooltip(tooltip)


def _stacking(mode: shapes.StackingMode) -> common.StackingConfig:
    return common.StackingConfig().mode(mode).group("A")


def number(panel: Panel) -> Any:
    """The latest value, large."""
    return _number(panel).graph_mode(shapes.BigValueGraphMode.NONE)


def share_or_idle(panel: Panel) -> Any:
    """A share of what happened; where nothing did it says so, because there is none."""
    idle = model.ValueMappingResult(text="idle", index=0)
    nan = model.DashboardSpecialValueMapOptions(match=model.SpecialValueMatch.NA_N, result=idle)
    return number(panel).mappings([model.SpecialValueMap(options=nan)]).max(1)


def number_above_zero_is_bad(panel: Panel) -> Any:
    steps = [model.Threshold(color="green", value=None), model.Threshold(color="red", value=1)]
    return number(panel).thresholds(_steps(steps)).color_mode(shapes.BigValueColorMode.BACKGROUND)


def _number(panel: Panel) -> stat.Panel:
    reduce = common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    made: stat.Panel = panel.on(stat.Panel())
    return made.reduce_options(reduce).color_mode(shapes.BigValueColorMode.VALUE)


def _steps(steps: list[model.Threshold]) -> dashboard.ThresholdsConfig:
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def filled(panel: Panel) -> Any:
    """Bars from 0 to 1."""
    reduce = common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    made = panel.on(bargauge.Panel()).min(0).max(1).reduce_options(reduce)
    made = made.orientation(shapes.VizOrientation.HORIZONTAL)
    return made.display_mode(shapes.BarGaugeDisplayMode.BASIC).thresholds(
        _steps([model.Threshold(color="blue", value=None)])
    )


def good_or_not(panel: Panel) -> Any:
    """Values are 1 while all is well, else 0."""
    options = {
        "1": model.ValueMappingResult(text="ok", color="green", index=0),
        "0": model.ValueMappingResult(text="look", color="red", index=1),
    }
    made = panel.on(statetimeline.Panel()).mappings([model.ValueMap(options=options)])
    return made.show_value(shapes.VisibilityMode.NEVER).row_height(0.9)


# --- panels of one figure


def tile(
    title: str, says: str, unit: str, query: str, build: Callable[[Panel], Any] = number
) -> Panel:
    """One number, small."""
    return Panel(title, says, unit, [Line(query, "")], width=4, height=4, build=build)


# --- panels of one metric of each daemon, or a few


def by_daemon(title: str, unit: str, name: str, label: str = "", says: str = "") -> Panel:
    """One metric of each daemon, and of each value of its label: counters as rates."""
    value = rate(name) if name.endswith("_total") else metric(name)
    by = f"instance, {label}" if label else "instance"
    legend = "{{instance}}" + (f" {{{{{label}}}}}" if label else "")
    return Panel(title, says or f"kvwarehouse_{name}", unit, [Line(total(value, by), legend)])


def several(title: str, unit: str, says: str, **names: str) -> Panel:
    """Metrics of each daemon: what they are called here, and their names."""
    lines = [
        Line(
            total(rate(name) if name.endswith("_total") else metric(name), "instance"),
            f"{{{{instance}}}} {word.replace('_', ' ')}",
        )
        for word, name in names.items()
    ]
    return Panel(title, says, unit, lines)


def where_on(panel: Panel) -> Panel:
    """Of a part that not every daemon has: zeros for those without it."""
    lines = [Line(or_zero(line.query), line.legend) for line in panel.lines]
    return Panel(panel.title, panel.says, panel.unit, lines)


def piled(panel: Panel) -> Panel:
    """Its lines upon each other: their sum is seen too."""
    return replace(panel, build=stacked)


def names_only(panel: Panel) -> Any:
    """The legends, large."""
    return number(panel).text_mode(shapes.BigValueTextMode.NAME)
