"""The vLLM engine, in this process or sharded over several."""
