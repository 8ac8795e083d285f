"""A discrete-event model of a fleet, for capacity planning."""
