"""The subcommands of `rolloutmq`, a room per section of its help."""
