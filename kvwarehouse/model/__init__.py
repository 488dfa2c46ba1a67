"""What of a model decides how large its KV is, and how large that is."""
