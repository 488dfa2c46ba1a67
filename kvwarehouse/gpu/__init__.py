"""What has to do with GPUs: what this machine has, how pages on NVMe get to a device, which way is
the fastest. Nothing of a vendor is imported before it is asked for, and never by import of this
package.

    found = kvwarehouse.gpu.probe_machine()          # in a process of its own, bounded
    for line in found.describe(): print(line)
"""

from kvwarehouse.gpu.auto_path import AutoPath, reader
from kvwarehouse.gpu.machine import PROBE_TIMEOUT_S, Machine, probe_machine
from kvwarehouse.gpu.pages import DeviceGather, prepare, relaxed_capture_mode, wait_event
from kvwarehouse.gpu.path_benchmark import LoadPath, Rates, measure
from kvwarehouse.gpu.path_selection import Choice, last_selection, select_path
from kvwarehouse.gpu.staging_area import DeviceStagingArea

__all__ = [
    "PROBE_TIMEOUT_S",
    "AutoPath",
    "Choice",
    "DeviceGather",
    "DeviceStagingArea",
    "LoadPath",
    "Machine",
    "Rates",
    "last_selection",
    "measure",
    "prepare",
    "probe_machine",
    "reader",
    "relaxed_capture_mode",
    "select_path",
    "wait_event",
]
