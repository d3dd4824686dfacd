"""A run from launch to end: stages, checkpoints, metrics, divergence, stopping.

train.py uses all of it; sample.py only `checkpoint`.
"""
