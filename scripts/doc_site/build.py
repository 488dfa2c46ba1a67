"""Builds the documents as a site in build/site; run through `make docs`. Warnings are errors.

The sources lie in build/docs as they lie in the repository: Markdown as it is, with README.md as
the front page, and pages that are made of the code in docs/reference. What a document links to and
is none (a script, a file of rules) comes along to be downloaded. A link to a folder, which is of
use on a repository's host alone, becomes its text.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

from doc_site.reference import ROOT, pages

SOURCES, SITE = ROOT / "build" / "docs" / "sources", ROOT / "build" / "site"

NAVIGATION = {
    "Start": "engines vllm sglang trtllm lmcache transformers python gpu",
    "Concepts": "glossary architecture",
    "Operations": "operations troubleshooting events sizing policies routing shared",
    "Reference": "reference/commands reference/settings reference/metrics reference/errors"
    " reference/grpc reference/python protocol format",
    "Guarantees": "guarantees verified",
    "Benchmarks": "benchmarks performance",
    "Development": "/CONTRIBUTING /CHANGELOG",
    "Design notes": "design/backups design/listed-namespaces design/nvme-extents"
    " design/remote-tier design/salts-in-listings",
}
"""What stands beside every page: names in docs, or from the root. A document that is not among them
fails the build."""

_LINK = re.compile(r"(\[[^\]]*\])\(((?![a-z]+:)[^)\s#]+)(#[^)\s]*)?\)")


def main() -> int:
    os.environ |= {"COLUMNS": "90", "NO_COLOR": "1"}  # for the usage of commands
    wanted = {path: _prepared(path) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))}
    wanted |= {ROOT / "docs" / "reference" / f"{name}.md": text for name, text in pages().items()}
    wanted[ROOT / "index.md"] = wanted.pop(ROOT / "README.md") + _toctrees()
    if any(ROOT / path.relative_to(SOURCES) not in wanted for path in SOURCES.rglob("*.md")):
        shutil.rmtree(SOURCES.parent)
        shutil.rmtree(SITE, ignore_errors=True)
    for path, text in wanted.items():
        _write(path, text.encode())
        for _, name, _ in _LINK.findall(text):
            target = (path.parent / name).resolve()
            if target.suffix != ".md" and target.is_file():
                _write(target, target.read_bytes())
    flags = ["-W", "--keep-going", "-q", "-j", "2", "-d", SOURCES.with_name("doctrees")]
    flags += ["-c", Path(__file__).parent, SOURCES, SITE]
    failed = build_main([str(each) for each in flags])
    if failed:  # else the next build would not read again what it warned of
        shutil.rmtree(SOURCES.parent)
    return failed


def _prepared(path: Path) -> str:
    """The text of a document as the site has it."""

    def link(match: re.Match[str]) -> str:
        target = (path.parent / match[2]).resolve()
        if target.is_dir():
            return match[1][1:-1]
        if target == ROOT / "README.md":
            return match[0].replace("README.md", "index.md")
        return match[0]

    return _LINK.sub(link, path.read_text("utf-8"))


def _toctrees() -> str:
    found = ""
    for caption, names in NAVIGATION.items():
        paths = [name if name[0] == "/" else f"docs/{name}" for name in names.split()]
        found += (
            f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(paths) + "\n```\n"
        )
    return found


def _write(path: Path, content: bytes) -> None:
    """Into the sources; what is there already is not touched, and Sphinx does not read it again."""
    target = SOURCES / path.relative_to(ROOT)
    if not target.is_file() or target.read_bytes() != content:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
