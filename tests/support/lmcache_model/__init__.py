"""A contract model of what LMCache passes to an L2: our own reading of its keys and memory objects,
and of the order of its calls. Not LMCache; tests/engines/lmcache has the real one."""
