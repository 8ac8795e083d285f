"""The buffer on real servers."""
