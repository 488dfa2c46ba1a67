"""What connectors of all engines share. No engine is imported here; torch by device_memory.py,
tensor_memory.py, layout_self_test.py and torch_stream.py alone, which nothing else here imports."""

from kvwarehouse_connectors.core.geometry import PageGeometry, Plane, PlaneMemory

__all__ = ["PageGeometry", "Plane", "PlaneMemory"]
