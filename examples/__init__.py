"""Complete training loops, each started by one command."""
