"""How good a checkpoint is: models held to a task.

evaluate.py alone uses `evaluate`, and the tasks: `corpus`, a text to predict, and `hellaswag`,
questions. Its own: `predict` (the loss of each token) and `estimate` (a mean and its standard
error).
"""
