"""The parts of bench/gpu_facts.py. They need the standard library alone, the last one torch."""
