"""`rolloutmq init`: write the folder of a new project."""
