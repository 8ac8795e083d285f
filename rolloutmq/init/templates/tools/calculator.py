"""The tool of the model; its annotations and its docstring are what the model reads about it."""


def calculate(numbers: list[float]) -> float:
    """Add numbers; give those to subtract with a minus sign."""
    return sum(numbers)
