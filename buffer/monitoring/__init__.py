"""What people and programs see of a run: views, metrics, traces, history."""
