"""Model a fleet with discrete events, for capacity planning."""
