"""A run from launch to end: stages, checkpoints, metrics, divergence, requests.

Others use `checkpoint` and `words` (sentence), which says to a person what metrics record. train.py
alone uses `launch`, `length`, `lock` (only_run_in_folder), `metrics` (Log), `recovery`, `signals`
and `stages` (Stages: eager, compiled, with larger micro-batches). Its own: `saving`, which writes
checkpoints behind the run, `record`, with which each launch begins in metrics.jsonl, `trackers`,
who else gets records, and `spikes`.
"""
