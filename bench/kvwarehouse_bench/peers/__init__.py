"""The same work on kvwarehouse and on what a user would pick instead, in turns.

The bench itself (contenders, workloads, report) runs in the project's environment; each store has
its client in a process of its own, maybe in another environment: `client.py` and `stores/` there,
which import the standard library, numpy and the store's own package, nothing else.
"""
