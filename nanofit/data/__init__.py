"""Parquet, JSON Lines or text -> bins -> the micro-batches of step s.

Others use `loader` (TrainSequences, ValSequences, val_starts, MicroBatch, random_micro_batches,
mix), `tokens` (open_bins, open_val), `text` (read_text), `tokenizer`, `shards` (find_shards,
open_shards) and `parquet` (mean_token_count). prepare_fineweb.py alone uses `documents`, which
makes tokens of the texts in shards, `bins`, which writes these, `dataset`, which describes a folder
of them, `engine`, which spreads the work over many machines, `source`, what is known of a file of
documents, `lines`, which reads those of JSON or text, `digests` (SourceDigests), and `remote`
(stop_waiting), files at an address. Its own: `form`, what a JSON file must look like.
"""
