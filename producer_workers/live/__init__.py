"""Serve sessions to programs that nobody here starts: `rolloutmq gateway`."""
