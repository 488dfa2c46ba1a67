"""Real parts of SGLang on the CPU: its controllers, host pools and factory of storage backends,
with the test in the place of the scheduler. Import `absent` before anything of SGLang."""
