"""The rule by which a store itself deletes a fleet's objects that nobody uses any more: what is
left when no daemon lives that would. obstore has no call for it, so a rule is text for the store's
own tools. Stateless; thread-safe.

It spares small objects where a store can tell them apart: pages have 8 KiB and more, and what says
that a namespace was cleared has to stay for as long as there is anything older.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from kvwarehouse.remote.names import FleetNames

LEAST_PAGES_BYTES: Final = 8192
RULE_FILE: Final = "rule.json"


@dataclass(frozen=True)
class LifecycleRule:
    """`rule`: as JSON in RULE_FILE, {} where there is none. `command` sets it."""

    days: int
    rule: Mapping[str, Any]
    command: str
    note: str


def lifecycle_rule(url: str, names: FleetNames, ttl_days: int) -> LifecycleRule:
    """A day above the TTL: days are whole, and an object stays for all of its last one."""
    parts = urlsplit(url)
    days = ttl_days + 1
    below = unquote(parts.path).strip("/")
    prefix = f"{below}/{names.root}" if below else names.root
    bucket = parts.hostname or ""
    make = {"s3": _s3, "gs": _gs, "az": _az}.get(parts.scheme)
    if make is None:
        return _folder(unquote(parts.path).rstrip("/"), names, days)
    return make(bucket, prefix, f"kvwarehouse-{names.fleet.hex()[:8]}", days)


def _s3(bucket: str, prefix: str, name: str, days: int) -> LifecycleRule:
    rule = {
        "ID": name,
        "Status": "Enabled",
        "Filter": {"And": {"Prefix": prefix, "ObjectSizeGreaterThan": LEAST_PAGES_BYTES - 1}},
        "Expiration": {"Days": days},
    }
    command = (
        f"aws s3api put-bucket-lifecycle-configuration --bucket {shlex.quote(bucket)}"
        f" --lifecycle-configuration file://{RULE_FILE}"
    )
    note = (
        "It replaces all rules of the bucket: add this one to those that `aws s3api"
        f" get-bucket-lifecycle-configuration --bucket {shlex.quote(bucket)}` shows. A store that"
        " refuses ObjectSizeGreaterThan (older Ceph, MinIO) takes"
        f' "Filter": {{"Prefix": "{prefix}"}} in its place'
    )
    return LifecycleRule(days, {"Rules": [rule]}, command, note)


def _gs(bucket: str, prefix: str, name: str, days: int) -> LifecycleRule:
    rule = {"action": {"type": "Delete"}, "condition": {"age": days, "matchesPrefix": [prefix]}}
    where = shlex.quote(f"gs://{bucket}")
    command = f"gcloud storage buckets update {where} --lifecycle-file={RULE_FILE}"
    note = (
        "It replaces all rules of the bucket: add this one to those that `gcloud storage buckets"
        f' describe {where} --format="default(lifecycle_config)"` shows'
    )
    return LifecycleRule(days, {"rule": [rule]}, command, note)


def _az(container: str, prefix: str, name: str, days: int) -> LifecycleRule:
    rule = {
        "enabled": True,
        "name": name,
        "type": "Lifecycle",
        "definition": {
            "actions": {"baseBlob": {"delete": {"daysAfterModificationGreaterThan": days}}},
            "filters": {"blobTypes": ["blockBlob"], "prefixMatch": [f"{container}/{prefix}"]},
        },
    }
    command = (
        "az storage account management-policy create --account-name ACCOUNT --resource-group GROUP"
        f" --policy @{RULE_FILE}"
    )
    note = (
        "It replaces the policy of the account: add this rule to those that `az storage account"
        " management-policy show --account-name ACCOUNT --resource-group GROUP` shows"
    )
    return LifecycleRule(days, {"rules": [rule]}, command, note)


def _folder(path: str, names: FleetNames, days: int) -> LifecycleRule:
    where = shlex.quote(f"{path}/{names.root.rstrip('/')}")
    command = f"find {where} -type f -size +{LEAST_PAGES_BYTES // 1024 - 1}k -mtime +{days} -delete"
    note = "A folder has no rules: it is for a daily job of cron, where no daemon may be left"
    return LifecycleRule(days, {}, command, note)
