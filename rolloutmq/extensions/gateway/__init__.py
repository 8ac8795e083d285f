"""Run agent programs unchanged: a local endpoint of their APIs records what they generate."""
