"""One optimiser step, whole or undone.

Others use `step` (train_step, evaluate, UpdateInterrupted), `optim` (build_optimizer and the
learning rate), `undo`, `compiler`, `loss` and `chunks`. `moments`, 8-bit AdamW, is optim's and the
checkpoint's.
"""
