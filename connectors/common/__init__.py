"""What connectors of all engines share. No engine and no torch is imported here."""

from kvwarehouse_connectors.common.geometry import PageGeometry, Plane, PlaneMemory

__all__ = ["PageGeometry", "Plane", "PlaneMemory"]
