"""Long proofs of what the queue promises: `make test` does not collect them."""
