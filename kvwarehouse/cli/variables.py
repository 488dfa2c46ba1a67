"""What commands say of environment variables that look like ours. Serve has a log for it."""

from __future__ import annotations

import os
import sys

from kvwarehouse import config


def warn_of_variables() -> None:
    """Says on stderr which of this process's variables look like ours, and nobody reads."""
    for text in config.unknown_variables(os.environ):
        print(f"kvwarehouse: {text}", file=sys.stderr)
