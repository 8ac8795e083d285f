"""Groups to a file and back, for people who choose data."""
