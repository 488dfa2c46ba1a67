"""A contract model of vLLM's tiering manager: its CPU tier's rows and its jobs, over the tier's
core and without vLLM."""
