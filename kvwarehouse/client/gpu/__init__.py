"""What a client in an engine's process needs to move pages of a GPU; nothing of it is imported
before pages on a device are given."""
