"""Teachers: models that say how likely they find the tokens of rollouts.

Users read docs/pages/distillation.md.

`settings` has the values of a config, `section` attaches them to tasks, `rules` compares them with
other sections, `judge` asks the models of `model` about groups.
"""
