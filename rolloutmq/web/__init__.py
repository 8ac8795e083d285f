"""`rolloutmq web`: the live view in a browser."""
