"""One snapshot of everything the daemon knows of itself, for Status and for a scrape.

Thread-safe. Before the core runs there is no core in it.
"""

from __future__ import annotations

from collections.abc import Callable

from kvwarehouse.config import Config
from kvwarehouse.daemon.admission import Connections, Refusals
from kvwarehouse.daemon.health import Lifecycle
from kvwarehouse.daemon.ledger import Ledger
from kvwarehouse.daemon.path_watch import PathWatch
from kvwarehouse.daemon.problems import Problems
from kvwarehouse.daemon.transfer import Staging
from kvwarehouse.daemon.warehouse import DaemonWarehouse
from kvwarehouse.errors import TransportError
from kvwarehouse.wire import status_pb2


class Snapshots:
    def __init__(
        self,
        config: Config,
        version: str,
        lifecycle: Lifecycle,
        refusals: Refusals,
        connections: Connections,
    ) -> None:
        self._config = config
        self._version = version
        self._lifecycle = lifecycle
        self._refusals = refusals
        self._connections = connections
        self._problems = Problems()
        self._warehouse: DaemonWarehouse | None = None
        self._ledger: Ledger | None = None
        self._staging: Staging | None = None
        self.path_watch: PathWatch | None = None
        self.kv_events: Callable[[], status_pb2.KvEventsStatus] | None = None
        self.remote: Callable[[], status_pb2.RemoteStatus] | None = None
        self.nvme_unanswered = ""  # why there is no NVMe tier though one was named
        self.fleet_id = ""
        self.http = ""
        self.listen = ""

    def attach(self, warehouse: DaemonWarehouse, ledger: Ledger, staging: Staging) -> None:
        """Called once, when the core runs."""
        self._ledger, self._staging = ledger, staging
        self._warehouse = warehouse

    def serving(self) -> status_pb2.Status:
        """As take(). Raises TransportError (code "recovering") before the core runs."""
        if self._warehouse is None:
            raise TransportError("the daemon is still recovering; try again", code="recovering")
        return self.take()

    def take(self) -> status_pb2.Status:
        """Waits for the core's thread; raises TransportError when it does not answer. Notes what
        is wrong, whose age is counted from then on."""
        status = status_pb2.Status(
            name=self._config.name, version=self._version, state=self._lifecycle.state.value
        )
        if self._warehouse is not None:
            status.core.CopyFrom(self._warehouse.core_status())
            if self.nvme_unanswered:
                nvme = status.core.tiers.nvme
                nvme.health, nvme.reason = "no_answer", self.nvme_unanswered
            status.service.CopyFrom(self._service())
            if self.kv_events is not None:
                status.kv_events.CopyFrom(self.kv_events())
            if self.remote is not None:
                status.remote.CopyFrom(self.remote())
        self._problems.add_to(status)
        return status

    def _service(self) -> status_pb2.ServiceStatus:
        assert self._ledger is not None
        assert self._staging is not None
        return status_pb2.ServiceStatus(
            ledger_health=self._ledger.health,
            ledger_reason=self._ledger.reason,
            ledger_tombstones=self._ledger.tombstone_count(),
            streams=self._staging.streams,
            streams_max=self._config.streams,
            staging_bytes=self._staging.bytes,
            staging_bytes_max=self._staging.bytes_max,
            socket=self._config.socket,
            listen=self.listen,
            http=self.http,
            connections=self._connections.count,
            connections_max=self._connections.bound if self.listen else 0,
            refused=self._refusals.counts,
            paths_reason=self.path_watch.reason if self.path_watch else "",
            fleet_id=self.fleet_id,
        )
