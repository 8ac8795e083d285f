"""The policy as a trainer computes it: loaded, packed, and scored token by token."""
