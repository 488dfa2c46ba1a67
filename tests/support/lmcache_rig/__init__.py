"""LMCache's real parts, on the CPU, for tests of the connector."""
