"""A whole config: its sections from all packages, how it is read, and its checks."""
