"""What docs/operations.md tells an operator to write and to watch is there."""

from __future__ import annotations

import re
from pathlib import Path

from kvwarehouse import config
from kvwarehouse.daemon.metrics import METRICS

TEXT = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


def test_configuration_file_of_the_document_is_one(tmp_path: Path) -> None:
    file = tmp_path / "kvwarehouse.toml"
    file.write_text(TEXT.partition("```toml\n")[2].partition("```")[0], encoding="utf-8")
    found = config.load({"config": str(file)}, {})
    assert found.sources["nvme_capacity_bytes"] == str(file)


def test_metrics_of_the_document_are_exported_with_the_labels_it_names() -> None:
    named = re.findall(r"`(kvwarehouse_\w+)(?:\{\w+=\"(\w+)\"\})?", TEXT)
    assert len(named) > 5
    for name, value in named:
        assert name in METRICS
        assert not value or value in METRICS[name].values
