"""Parquet -> bins -> the micro-batches of step s.

To train, others use `loader` (TrainSequences, ValSequences, MicroBatch), `tokens` (open_bins) and
`tokenizer`. The rest is prepare_fineweb.py's: `parquet` reads shards, `documents` makes tokens of
them, `bins` writes these, `dataset` does it for a folder, `engine` on many machines.
"""
