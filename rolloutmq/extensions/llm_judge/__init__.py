"""judge = "llm": a language model as judge, with the values of [tasks.<name>.llm].

section.py     its values
questions.py   what the model is asked, and how its answers are read
judge.py       the judge: one question for a response, or pairs of responses of a group
"""
