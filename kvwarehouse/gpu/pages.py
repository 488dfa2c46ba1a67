"""What pages in the memory of a device need: the driver, and the kernels compiled."""

from __future__ import annotations


def prepare(address: int) -> int:
    """Makes ready what loads and stores of pages at `address`, in a device's memory, need, so that
    the first of them need not. Returns the device's ordinal, for `Regions.on_device`.

    Blocks for a second the first time in a process. Raises UsageError: code "no_gpu" without a
    driver, "bad_device_memory" for an address that no device has, "no_nvrtc" without the compiler
    library; InternalError (code "bad_kernels") where that refuses the kernels."""
    from kvwarehouse import engine
    from kvwarehouse.client.gpu.kernels import compiled

    ordinal = int(engine.device_of(address))
    compiled(*engine.device_capability(ordinal))
    return ordinal
