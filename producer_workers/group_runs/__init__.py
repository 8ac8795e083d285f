"""What a worker does with a claimed group: sample it, judge it, submit or release it."""
