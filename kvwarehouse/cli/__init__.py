"""The command line `kvwarehouse`. Commands of this package are listed in commands.py, those of
other packages come through the entry point group `kvwarehouse.commands` (commands.py)."""

from kvwarehouse.cli.main import main

__all__ = ["main"]
