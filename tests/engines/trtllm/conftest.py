"""TensorRT-LLM where it is installed; else its contract model stands in its place, and what needs
the real one is skipped."""

from __future__ import annotations

import importlib.util

from trtllm_model import interface

if importlib.util.find_spec("tensorrt_llm") is None:
    interface.install("new")
