"""What the tests of the vLLM connector run on: tiny checkpoints, real engines and servers as
processes of their own, a comparison of outputs, and the places of pages in a daemon's arena.

Imported by tests (pyproject's `pythonpath`), and by the processes that they start.
"""
