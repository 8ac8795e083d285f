"""The subcommands of `rolloutmq`, one file per group of them."""
