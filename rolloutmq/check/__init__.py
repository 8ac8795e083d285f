"""`rolloutmq check`: everything about a config that can be known before a GPU is used."""
