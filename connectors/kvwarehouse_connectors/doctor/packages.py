"""What distributions the environment has. Imports none of them but `packaging`, where it is."""

from __future__ import annotations

import sys
from importlib import metadata

from kvwarehouse_connectors.doctor.facts import SoftwareFacts

_SHOWN = ("kvwarehouse", "grpcio", "protobuf", "numpy")


def software_facts(engine: str, plugin_group: str) -> SoftwareFacts:
    """engine: name of its module. plugin_group: "" for none."""
    brought_by = tuple(sorted(set(metadata.packages_distributions().get(engine, ()))))
    versions = {name: _version(name) for name in (*_SHOWN, engine, *brought_by)}
    points = metadata.entry_points(group=plugin_group) if plugin_group else ()
    return SoftwareFacts(
        python=sys.executable,
        versions={name: version for name, version in versions.items() if version},
        engine_distributions=brought_by,
        plugins=tuple(sorted((point.name, point.value) for point in points)),
        unmet=unmet_requirements("kvwarehouse"),
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def unmet_requirements(distribution: str) -> tuple[str, ...]:
    """Those of its requirements, extras left out, that the environment does not meet. Empty where
    that cannot be told: without `packaging`, which every engine's environment has."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return ()
    unmet = []
    for text in metadata.requires(distribution) or ():
        try:
            need = Requirement(text)
        except InvalidRequirement:
            continue
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        found = _version(need.name)
        if not found or not need.specifier.contains(found, prereleases=True):
            unmet.append(f"{need.name}{need.specifier} (found: {found or 'none'})")
    return tuple(unmet)
