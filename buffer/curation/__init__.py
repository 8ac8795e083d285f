"""Groups as lines of JSON: export and import."""
