"""The rule by which a store itself deletes what is old, in the words of each store's own tools."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.remote.lifecycle import LEAST_PAGES_BYTES, lifecycle_rule
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.object_store import StoreSettings, open_store

NAMES = FleetNames(bytes(range(16)))
ROOT = "v1/000102030405060708090a0b0c0d0e0f/"


def prefixes(value: Any) -> list[str]:
    """All texts in a rule that have the fleet in them."""
    if isinstance(value, str):
        return [value] if ROOT in value else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [found for each in inner for found in prefixes(each)]


@pytest.mark.parametrize(
    ("url", "prefix", "says"),
    [
        ("s3://kv/prod", f"prod/{ROOT}", "put-bucket-lifecycle-configuration --bucket kv"),
        ("s3://kv", ROOT, "file://rule.json"),
        ("gs://kv/a/b", f"a/b/{ROOT}", "gcloud storage buckets update gs://kv"),
        ("az://box/prod/", f"box/prod/{ROOT}", "--policy @rule.json"),
    ],
)
def test_rule_is_of_the_fleets_prefix_alone(url: str, prefix: str, says: str) -> None:
    made = lifecycle_rule(url, NAMES, 7)
    assert prefixes(dict(made.rule)) == [prefix]
    assert says in made.command
    assert made.days == 8
    assert json.loads(json.dumps(dict(made.rule))) == made.rule
    assert "replaces" in made.note


def test_rule_of_s3_spares_what_is_smaller_than_pages() -> None:
    (rule,) = lifecycle_rule("s3://kv", NAMES, 1).rule["Rules"]
    assert rule["Filter"]["And"]["ObjectSizeGreaterThan"] == 8191
    assert rule["Expiration"] == {"Days": 2}


def test_folder_has_a_command_and_no_rule() -> None:
    made = lifecycle_rule("file:///mnt/my%20kv", NAMES, 7)
    assert made.rule == {}
    words = shlex.split(made.command)
    assert words[:2] == ["find", f"/mnt/my kv/{ROOT.rstrip('/')}"]
    assert words[-3:] == ["-mtime", "+8", "-delete"]


def test_command_of_a_folder_spares_what_was_copied_to_a_new_day(tmp_path: Path) -> None:
    """Incident: a copy was a link as old as the object was at first, so the job deleted what was
    used every day."""
    url = f"file://{tmp_path}"
    store = open_store(StoreSettings(url))
    hot, old = bytes([1] * 16), bytes([2] * 16)

    def name(key: bytes, day: int) -> str:
        return NAMES.pages(PagesName(bytes(16), 0, day, key))

    for key in (hot, old):
        store.put(name(key, 20_000), bytes(LEAST_PAGES_BYTES))
        os.utime(tmp_path / name(key, 20_000), (1e9, 1e9))
    store.copy(name(hot, 20_000), name(hot, 20_009))
    subprocess.run(shlex.split(lifecycle_rule(url, NAMES, 7).command), check=True)
    left = {item.name for item in store.list(NAMES.root)}
    assert name(hot, 20_009) in left
    assert name(old, 20_000) not in left
