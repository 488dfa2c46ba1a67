"""The native core. Sole importer of the extension module; everything else imports from here."""

from importlib.util import find_spec

try:
    # In this form import-linter, which does not see extension modules, takes it for what it is.
    from kvwarehouse.core import _native
except ImportError as missing:
    if find_spec("kvwarehouse.core._native") is not None:
        raise  # it is there and does not load: its own text says why
    # The usual cause: the source tree is on the path before the installed package.
    raise ModuleNotFoundError(
        "kvwarehouse's native core is not built for this Python; run `make setup` in the source "
        "tree and use .venv/bin/python, or install the package and start outside the source tree",
        name="kvwarehouse.core._native",
    ) from missing

ENDLESS = _native.ENDLESS
GET_ENDS = _native.GET_ENDS
MAX_ENGINE_KEY_BYTES = _native.MAX_ENGINE_KEY_BYTES
MAX_NAMESPACES = _native.MAX_NAMESPACES
MAX_PAGE_TOKENS = _native.MAX_PAGE_TOKENS
MAX_SHARDS = _native.MAX_SHARDS
SECRET_BYTES = _native.SECRET_BYTES
VERSION = _native.VERSION

Core = _native.Core
CoreOptions = _native.CoreOptions
DeviceGather = _native.DeviceGather
DeviceStage = _native.DeviceStage
Extents = _native.Extents
Feed = _native.Feed
FilledRun = _native.FilledRun
GatherPlan = _native.GatherPlan
NativeClient = _native.NativeClient
PackedRun = _native.PackedRun
Pins = _native.Pins
PresenceFile = _native.PresenceFile
Recorded = _native.Recorded
Regions = _native.Regions
RelaxedCaptureMode = _native.RelaxedCaptureMode
RemoteGetLink = _native.RemoteGetLink
RemoteLink = _native.RemoteLink
RunToGet = _native.RunToGet
RunToPut = _native.RunToPut

chain_keys = _native.chain_keys
check_object = _native.check_object
check_options = _native.check_options
copy_path = _native.copy_path
copy_streaming = _native.copy_streaming
cuda_version = _native.cuda_version
device_capability = _native.device_capability
device_of = _native.device_of
index_bytes = _native.index_bytes
index_costs = _native.index_costs
io_engine_probe = _native.io_engine_probe
optimal_hits = _native.optimal_hits
page_digest = _native.page_digest
policy_names = _native.policy_names
presence_costs = _native.presence_costs
replay = _native.replay
table_bytes = _native.table_bytes
wait_event = _native.wait_event

__all__ = [
    "ENDLESS",
    "GET_ENDS",
    "MAX_ENGINE_KEY_BYTES",
    "MAX_NAMESPACES",
    "MAX_PAGE_TOKENS",
    "MAX_SHARDS",
    "SECRET_BYTES",
    "VERSION",
    "Core",
    "CoreOptions",
    "DeviceGather",
    "DeviceStage",
    "Extents",
    "Feed",
    "FilledRun",
    "GatherPlan",
    "NativeClient",
    "PackedRun",
    "Pins",
    "PresenceFile",
    "Recorded",
    "Regions",
    "RelaxedCaptureMode",
    "RemoteGetLink",
    "RemoteLink",
    "RunToGet",
    "RunToPut",
    "chain_keys",
    "check_object",
    "check_options",
    "copy_path",
    "copy_streaming",
    "cuda_version",
    "device_capability",
    "device_of",
    "index_bytes",
    "index_costs",
    "io_engine_probe",
    "optimal_hits",
    "page_digest",
    "policy_names",
    "presence_costs",
    "replay",
    "table_bytes",
    "wait_event",
]
