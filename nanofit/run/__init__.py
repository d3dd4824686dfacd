"""A run from launch to end: stages, checkpoints, metrics, divergence, requests.

Others use `checkpoint`, `words` (sentence), which says to a person what metrics record, and `here`
(choose_here, capacity_of, measured_speed): what this machine, or a card, can do. train.py alone
uses `auto` (chosen_settings, of a run whose model is chosen), `launch`, `length`, `lock`
(only_run_in_folder), `metrics` (Log), `recovery`, `signals` and `stages` (Stages: eager, compiled,
with larger micro-batches). Its own: `saving`, which writes checkpoints behind the run, `record`,
with which each launch begins in metrics.jsonl, `trackers`, who else gets records, and `spikes`.
"""
