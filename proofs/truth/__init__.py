"""What a model was trained on is what the engine sampled: values that are recorded where they are made, compared with
what reaches the loss.
"""
