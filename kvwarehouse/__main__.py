"""`python -m kvwarehouse`: the same as the command `kvwarehouse`."""

import sys

from kvwarehouse.cli import main

if __name__ == "__main__":
    sys.exit(main())
