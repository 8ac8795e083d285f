"""Export and import of groups as lines of JSON or rows of Parquet."""
