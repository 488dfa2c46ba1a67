"""The worker of the remote tier, and what it is made of (docs/design/remote-tier.md)."""
