"""Prints requirements of pyproject.toml, one a line: what pip is given by the scripts here.

    pyproject_requirements.py NAME[,NAME...]

A NAME is "build", "core", or an extra. Run in the project's folder. Any Python from 3.11.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(names: str) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    known = dict(project["project"]["optional-dependencies"])
    known["build"] = project["build-system"]["requires"]
    known["core"] = project["project"]["dependencies"]
    for name in names.split(","):
        for line in known[name]:
            print(line)


if __name__ == "__main__":
    main(sys.argv[1])
