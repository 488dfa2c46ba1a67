"""What has to do with GPUs: what this machine has, how pages on NVMe get to a device, which way is
the fastest. Nothing of a vendor is imported before it is asked for, and never by import of this
package.

    found = kvwarehouse.gpu.look()          # in a process of its own, bounded
    for line in found.words(): print(line)
"""

from kvwarehouse.gpu.choice import Choice, choose, last_words
from kvwarehouse.gpu.chosen_lane import ChosenLane, reader
from kvwarehouse.gpu.machine import PROBE_TIMEOUT_S, Machine, look
from kvwarehouse.gpu.pages import captures_aside, prepare, reached
from kvwarehouse.gpu.rates import Lane, Rates, measure
from kvwarehouse.gpu.staging_area import DeviceStagingArea

__all__ = [
    "PROBE_TIMEOUT_S",
    "Choice",
    "ChosenLane",
    "DeviceStagingArea",
    "Lane",
    "Machine",
    "Rates",
    "captures_aside",
    "choose",
    "last_words",
    "look",
    "measure",
    "prepare",
    "reached",
    "reader",
]
