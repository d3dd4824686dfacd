"""Cost and loss, before and during a run: arithmetic, free of torch.

Others use `scaling` (expected losses, useful epochs), `roofline` (the time of a step by its FLOPs
and bytes) and `forecast` (a run in numbers).
"""
