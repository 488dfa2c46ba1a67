"""Checks that what the documents refer to exists: linked files and headings, `make` targets.

Reads every Markdown file that git knows; writes nothing. Run through `make lint` and `make docs`.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:^|`)(?:\$ )?make ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)*)", re.MULTILINE)
_TARGET = re.compile(r"^([a-z][a-z -]*):", re.MULTILINE)


def main() -> int:
    targets = {
        name for names in _TARGET.findall((ROOT / "Makefile").read_text()) for name in names.split()
    }
    documents = _documents()
    problems = [line for path in documents for line in _problems(path, targets)]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"docs: {len(documents)} documents, {len(problems)} broken references")
    return 1 if problems else 0


def _documents() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).exists()]


def _problems(path: Path, targets: set[str]) -> Iterator[str]:
    text = path.read_text()
    where = path.relative_to(ROOT)
    for link in _LINK.findall(_CODE_BLOCK.sub("", text)):
        if not re.match(r"[a-z]+:", link) and not _resolves(path, link):
            yield f"{where}: links to {link}, which does not exist"
    for words in _COMMAND.findall(text):
        if words.split()[0] not in targets:
            yield f"{where}: names `make {words.split()[0]}`, which the Makefile does not have"


def _resolves(path: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (path.parent / name).resolve() if name else path
    if not target.exists():
        return False
    return not anchor or anchor in {
        _anchor(title) for title in _HEADING.findall(target.read_text())
    }


def _anchor(title: str) -> str:
    """The name that a heading is linked by, as repository hosts make it."""
    kept = re.sub(r"[^\w\- ]", "", title.lower())
    return kept.replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
