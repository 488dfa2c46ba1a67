"""What the peers did, as the part of a Markdown document that stands between its marks. Pure."""

from __future__ import annotations

from typing import Final

from kvwarehouse.cli.generated_section import replace_section
from kvwarehouse.cli.markdown import markdown_blocks, picture_name
from kvwarehouse.report.report import Plot, Report, TableBlock
from kvwarehouse_bench.peers.goals import MISSED

BEGIN: Final = "<!-- beside the peers: written by make bench-peers ARGS=--write, do not edit -->\n"
END: Final = "<!-- end of beside the peers -->\n"
_PREFIX = "peers"


def with_report(document: str, report: Report, pictures: str) -> str:
    """pictures: the folder of pictures(...), as links from the document see it. ValueError when it
    has no marks."""
    parts = [report.summary, *(f"- {note}" for note in report.notes)]
    text = "\n".join(parts)
    for block in report.blocks:
        part = markdown_blocks([block], pictures, _PREFIX, bold=[MISSED])[0]
        heading = f"### {_capital(block.title)}\n\n" if isinstance(block, TableBlock) else ""
        text += f"\n\n{heading}{part}"
    return replace_section(document, BEGIN, END, f"\n{text}\n\n")


def pictures(report: Report) -> dict[str, Plot]:
    """By the name of the file."""
    return {
        picture_name(block, _PREFIX): block for block in report.blocks if isinstance(block, Plot)
    }


def _capital(title: str) -> str:
    return title[:1].upper() + title[1:]
