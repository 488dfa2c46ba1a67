"""The doctor's process on the contract model of TensorRT-LLM's interface, at both of its paths."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvwarehouse_connectors.doctor.engine_process import engine_facts
from kvwarehouse_connectors.doctor.facts import EngineFacts
from trtllm_model.interface import PATHS, VERSIONS

MODEL = Path(__file__).parents[2] / "support"
_MOST_S = 60.0


def facts_of(path: str, *more: str) -> EngineFacts:
    """Of a process in which the model stands for TensorRT-LLM."""
    lines = (
        f"import sys; sys.path.insert(0, {str(MODEL)!r})",
        "from trtllm_model import interface",
        f"interface.install({path!r})",
        *more,
        "from kvwarehouse_connectors.doctor.probe import main",
        "main('trtllm')",
    )
    return engine_facts([sys.executable, "-c", "\n".join(lines)], _MOST_S)


@pytest.mark.parametrize("path", PATHS)
def test_connector_is_found_at_both_paths_of_the_interface(path: str) -> None:
    facts = facts_of(path)
    assert (facts.version, facts.engine_error) == (VERSIONS[path], "")
    assert (facts.registered, facts.connector_error, facts.crash) == (True, "", "")


def test_revision_that_asks_connectors_for_more_is_named() -> None:
    facts = facts_of(
        "new",
        f"base = sys.modules[{PATHS['new']!r}].KvCacheConnectorWorker",
        "base.prefetch = lambda self: None",
        "base.prefetch.__isabstractmethod__ = True",
        "base.__abstractmethods__ |= {'prefetch'}",
    )
    assert "prefetch" in facts.connector_error
    assert not facts.registered


def test_revision_whose_interface_is_elsewhere_is_named() -> None:
    facts = facts_of("new", f"del sys.modules[{PATHS['new']!r}]")
    assert "at neither of" in facts.connector_error
    assert facts.version
