"""What a trainer's checkpoint remembers, and how a server that lost something is told."""
