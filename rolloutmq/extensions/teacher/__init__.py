"""Teachers: models that say how likely they find the tokens of rollouts.

Users read docs/pages/distillation.md.

`section` has the values of a config, `rules` compares them with other sections, `judge` asks the
models of `model` about groups.
"""
