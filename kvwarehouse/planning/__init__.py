"""Answers before buying hardware: how large KV is, what loading it saves, what a trace would hit.

Pure arithmetic and files: no daemon, no network, no GPU. docs/sizing.md has the formulas and their
sources. Each command builds a Report (`kvwarehouse.report`), which the command line prints as
tables, as JSON or as one HTML page.
"""
