"""What connectors of all engines share. No engine is imported here; torch by device_memory.py and
tensor_proof.py alone, which nothing here imports."""

from kvwarehouse_connectors.common.geometry import PageGeometry, Plane, PlaneMemory

__all__ = ["PageGeometry", "Plane", "PlaneMemory"]
