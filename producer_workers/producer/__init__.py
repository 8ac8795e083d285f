"""The producer: strategies that decide what is generated next."""
