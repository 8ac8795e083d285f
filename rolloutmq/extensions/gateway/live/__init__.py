"""Serve live sessions to programs that users start themselves: `rolloutmq gateway`."""
