"""What all benchmarks of this folder share: arguments and exit status, processes that answer and
leave nothing behind, medians and their spread, and how figures are shown. Knows no engine.

Imported also by processes in other environments: process, exchange and answering need the standard
library alone.
"""
