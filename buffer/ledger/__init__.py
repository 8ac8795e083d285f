"""The life of a batch: taken, committed, archived, counted, and recovered after a loss."""
