"""A wire between publisher and subscriber that can be cut: what is published meanwhile is lost, as
on a network that fails or to a subscriber that is too slow. One owner; a thread of its own.
"""

from __future__ import annotations

import threading

import zmq


class LossyRelay:
    """From the PUB socket at `source` to one at `endpoint`, until close()."""

    def __init__(self, source: str, endpoint: str) -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(source)
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(endpoint)
        self.cut = threading.Event()
        self.lost = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            if not self._sub.poll(50):
                continue
            frames = self._sub.recv_multipart()
            if self.cut.is_set():
                self.lost += 1
            else:
                self._pub.send_multipart(frames)

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._context.destroy(linger=0)
