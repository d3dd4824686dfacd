"""What a checkpoint writes: text, alone or with a person.

Others use `samples` (take_samples), for a model that still learns, `generate`, and `shortage`
(shortage_in_one_line, if_it_fits: of memory). sample.py alone uses `write` and `chat`.
"""
