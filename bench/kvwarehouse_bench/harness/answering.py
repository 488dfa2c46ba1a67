"""The side of a program that a bench has started and asks: lines of JSON on a socket, in turns.

Each line in is {"do": name, "with": arguments}, each line out {"what": value} or {"error": text};
the first line out says that the program is ready. Ends, with all its processes, when the socket
does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any


def serve(connection: socket.socket, made: Callable[[], Any]) -> None:
    """made: whose methods do_NAME answer. Runs until it is told to quit."""
    with connection.makefile("rwb") as lines:

        def say(message: dict[str, Any]) -> None:
            lines.write(json.dumps(message).encode() + b"\n")
            lines.flush()

        try:
            host = made()
        except Exception:  # noqa: BLE001 - the process's edge: the bench gets it
            say({"error": traceback.format_exc()})
            return
        say({"what": None})
        for line in lines:
            asked = json.loads(line)
            if asked["do"] == "quit":
                return
            try:
                say({"what": getattr(host, f"do_{asked['do']}")(**asked["with"])})
            except Exception:  # noqa: BLE001 - as above
                say({"error": traceback.format_exc()})
    os.killpg(0, signal.SIGKILL)  # the bench is gone without a word
