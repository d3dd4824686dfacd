"""What a checkpoint is good for once it is there: text.

Others use `generate`.
"""
