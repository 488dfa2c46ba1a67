"""What docs/operations.md and docs/troubleshooting.md tell operators to write, run and watch is
there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from public_names import parser_of

from kvwarehouse import config
from kvwarehouse.cli.ls import APART_BY
from kvwarehouse.daemon.metrics import METRICS

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "operations.md").read_text(encoding="utf-8")


def test_configuration_file_of_the_document_is_one(tmp_path: Path) -> None:
    file = tmp_path / "kvwarehouse.toml"
    file.write_text(TEXT.partition("```toml\n")[2].partition("```")[0], encoding="utf-8")
    found = config.load({"config": str(file)}, {})
    assert found.sources["nvme_capacity_bytes"] == str(file)


@pytest.mark.parametrize("document", ["operations", "troubleshooting"])
def test_metrics_of_the_document_are_exported_with_the_labels_it_names(document: str) -> None:
    text = (DOCS / f"{document}.md").read_text(encoding="utf-8")
    named = re.findall(r"`(kvwarehouse_\w+)(?:\{\w+=\"(\w+)\"\})?", text)
    assert len(named) > 5
    for name, value in named:
        assert name in METRICS
        assert not value or value in METRICS[name].values


def test_health_to_watch_is_no_sign_of_a_tier_that_is_off() -> None:
    """A daemon without --nvme-dir was said to have a disk that refuses writes."""
    for name, value in re.findall(r"`(kvwarehouse_\w+)\{\w+=\"(\w+)\"\}` is 0", TEXT):
        assert value == "off" or "off" not in METRICS[name].values, name


def test_fields_that_troubleshooting_finds_under_apart_by_are_shown_there() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    for named in re.findall(r"apart by (`.*?) \|", text):
        assert set(re.findall(r"`(\w+)`", named)) <= set(APART_BY)


def test_commands_of_troubleshooting_are_taken() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    lines = re.findall(r"^kvwarehouse (\w+)(.*)", text, re.MULTILINE)
    assert len(lines) > 10
    for command, rest in lines:
        parser_of(command).parse_args(shlex.split(rest, comments=True))
