"""What the tests of the vLLM connector's parts are made of: vLLM's own requests, specs and tensors,
without an engine."""
