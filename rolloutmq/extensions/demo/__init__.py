"""The model of a run without [policy] model: built here, then trained on part of the run's task."""
