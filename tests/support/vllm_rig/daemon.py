"""The daemon beside a session's engines: tests kill and stop it, and hand it on alive."""

from __future__ import annotations

from kvwarehouse_bench.harness.serving import Serving


class Daemon(Serving):
    @property
    def running(self) -> bool:
        """Or stopped by a signal, but there."""
        return self._process is not None and self._process.poll() is None

    def revive(self) -> None:
        """Whatever was done to it, it serves."""
        if self.running:
            self.resume()
        else:
            self.kill()  # collects one that ended by itself
            self.start()
