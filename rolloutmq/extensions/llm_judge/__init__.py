"""judge = "llm": a language model as judge, with the values of [tasks.<name>.llm]."""
