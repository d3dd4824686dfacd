"""The parts of the pipeline, in rooms; each imports only those named before it.

terminal, files, lock, cache, weights · settings · machine · data · learning · memory · fit ·
outlook · run · report · use · evaluation, export. A room's own page says what it is for and what
others may use of it. `model.py` stands between learning and memory. docs/architecture.md draws it.
"""

import os

# torch's allocator warns of all memory it does not get, which our scripts tell in their own words.
# It reads this as it is imported, which none of them does before any of our modules.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
