"""Parquet -> bins -> the micro-batches of step s.

Others use `loader` (TrainSequences, ValSequences, val_starts, MicroBatch, random_micro_batches,
mix), `tokens` (open_bins, open_val), `text` (read_text), `tokenizer` and `parquet` (find_shards,
open_shards, mean_token_count), which reads shards. prepare_fineweb.py alone uses `documents`, which
makes tokens of their texts, `bins`, which writes these, `dataset`, which describes a folder of
them, `engine`, which spreads the work over many machines, and `remote` (is_remote, stop_waiting),
files at an address. Its own: `form`, what a JSON file must look like.
"""
