"""The engine on Hugging Face transformers, for small models on any CPU."""
