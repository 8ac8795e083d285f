"""A run from its records: batches as files, trained again, on another road, or judged again."""
