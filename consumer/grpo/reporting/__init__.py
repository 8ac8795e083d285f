"""What the trainer tells about its steps: logs, metrics and samples."""
