"""What workers and trainers agree on: groups, their wire format, and their life in Redis."""
