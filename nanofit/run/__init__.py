"""A run from launch to end: stages, checkpoints, metrics, divergence, stopping.

Others use `checkpoint`. train.py alone uses `launch`, `length`, `recovery` and `stop`. Its own:
`stages` (eager, compiled, with larger micro-batches), `metrics` (Log), `words`, which says to a
person what metrics record, and `spikes`.
"""
