"""The APIs that agents speak: one file each, which parses requests and writes answers."""
