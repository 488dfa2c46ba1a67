"""The client library: one surface, shared memory on the daemon's host, gRPC elsewhere."""

from kvwarehouse.client.client import Client
from kvwarehouse.client.connect import connect
from kvwarehouse.client.namespace import OpenNamespace
from kvwarehouse.client.pins import Pins
from kvwarehouse.client.regions import Regions

__all__ = ["Client", "OpenNamespace", "Pins", "Regions", "connect"]
