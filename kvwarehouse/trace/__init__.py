"""Traces of requests: read, written, made anonymous."""
