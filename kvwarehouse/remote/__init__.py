"""What the worker of the remote tier is made of (docs/design/remote-tier.md). Nothing starts it
yet."""
