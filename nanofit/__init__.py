"""The parts of the pipeline, in rooms; each imports only those named before it.

terminal, files, cache, weights · settings · machine · data · learning · memory · fit · outlook ·
run · use. A room's own page says what it is for and what others may use of it. `model.py` stands
between learning and memory. docs/architecture.md draws it.
"""
