"""Run agent programs unchanged: a local endpoint of the OpenAI API records what they generate."""
