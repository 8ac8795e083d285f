"""A run as a folder: saved from one server, loaded into another."""
