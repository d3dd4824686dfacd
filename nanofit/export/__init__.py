"""A checkpoint for others' tools: a Hugging Face folder.

export.py alone uses `export`. Its own: `card`, the page that goes with a model, `tokenizer_files`,
`load_back`, which has transformers load what was written, and `modeling_nanofit`, which is copied.
"""
