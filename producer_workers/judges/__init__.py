"""What turns a response into a reward."""
