"""Read a run once into a plain view, and render it as JSON and as metrics."""
