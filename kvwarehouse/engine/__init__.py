"""The native core. Sole importer of the extension module; everything else imports from here."""

try:
    from kvwarehouse.engine._native import (
        MAX_ENGINE_KEY_BYTES,
        MAX_NAMESPACES,
        MAX_PAGE_TOKENS,
        MAX_SHARDS,
        SECRET_BYTES,
        VERSION,
        Core,
        CoreOptions,
        NativeClient,
        Pins,
        Regions,
        chain_keys,
        copy_path,
        copy_streaming,
        io_engine_probe,
        page_digest,
    )
except ModuleNotFoundError as missing:
    if missing.name != "kvwarehouse.engine._native":
        raise
    # The usual cause: the source tree is on the path before the installed package.
    raise ModuleNotFoundError(
        "kvwarehouse's native core is not built for this Python; run `make setup` in the source "
        "tree and use .venv/bin/python, or install the package and start outside the source tree",
        name=missing.name,
    ) from missing

__all__ = [
    "MAX_ENGINE_KEY_BYTES",
    "MAX_NAMESPACES",
    "MAX_PAGE_TOKENS",
    "MAX_SHARDS",
    "SECRET_BYTES",
    "VERSION",
    "Core",
    "CoreOptions",
    "NativeClient",
    "Pins",
    "Regions",
    "chain_keys",
    "copy_path",
    "copy_streaming",
    "io_engine_probe",
    "page_digest",
]
