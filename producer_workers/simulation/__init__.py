"""What a fleet and a trainer would do, computed instead of rented: `rolloutmq simulate`."""
