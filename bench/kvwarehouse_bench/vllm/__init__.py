"""What the benchmarks of the vLLM connector share: a model made on the spot, engines as processes
of their own, the warehouse and vLLM's own offloading beside each other, and how figures are shown.

Imported by the scripts of bench/ and by the processes that they start; needs vLLM's environment.
"""
