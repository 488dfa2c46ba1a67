"""Sends a trace or a workload to a real engine, or to the daemon itself, and times it.

Above the client, the workloads and the reports, which it makes. A drive may go on for
days: what it keeps of what it saw has a fixed size.
"""
