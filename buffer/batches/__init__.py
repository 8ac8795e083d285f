"""The life of a batch: taken, committed, archived, accounted for, and recovered after a loss."""
