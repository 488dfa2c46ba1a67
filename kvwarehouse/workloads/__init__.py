"""Workloads that are made, not recorded: streams of requests with the published statistics of real
services, seeded, in the formats of the public traces.

Above planning, whose requests it makes, and traces, whose readers read what it writes; it opens no
connection and knows no engine. docs/sizing.md says what was fitted to what, and how well.
"""
