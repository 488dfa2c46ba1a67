"""A contract model of TensorRT-LLM's connector manager and executor: written from reading its
public sources, none of whose code is here. What passes against it is not thereby tested with
TensorRT-LLM.

Each rule names what it was read from:

    [M-new]   _torch/pyexecutor/connectors/kv_cache_connector.py, NVIDIA/TensorRT-LLM 035ab91cad04
    [M-old]   _torch/pyexecutor/kv_cache_connector.py, 00fdcbff5ad8
    [layout]  _torch/pyexecutor/connectors/kv_cache_layout.py, 0972960b5237
    [E]       _torch/pyexecutor/py_executor.py, a stored revision with both loops (_can_queue twice)
    [C++]     nanobind/batch_manager/bindings.cpp, 0159d90588fd: what a C++ request shows
    [doc]     docs/source/features/kv-cache-connector.md, the revision with request_reset

Not modelled: the overlap scheduler, CUDA streams and graphs, attention data parallelism,
speculative decoding, the C++ radix tree (a dictionary of prefixes stands for it).
"""
