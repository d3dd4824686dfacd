"""What fits on this machine: forecast, then proven by trials in a child process.

Others use `fit` (find_fit, Fit, StagePlan), `search` (sizes_for) and `trial` (share_compile_cache).
"""
