"""What fits on this machine: forecast, then proven by trials in a child process.

Others use `fit` (find_fit, Fit, StagePlan, MOST_RETRIES), `search` (sizes_for), which is free of
torch, `trial` (share_compile_cache) and `speed` (measure_speed), for plan.py.
"""
