"""Sends a trace or a workload to a real engine, or to the daemon itself, and times it.

Above the client, the planner (whose reports it makes) and the workloads. A drive may go on for
days: what it keeps of what it saw has a fixed size.
"""
