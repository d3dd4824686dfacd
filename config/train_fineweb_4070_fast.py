"""The published modern recipe on an RTX 4070: the plain one's loss from a sixth of the tokens.

modded-nanogpt's track 3, number by number; rates, schedule, decay and biases, which are not here,
are the defaults of Muon and modern. One shard is repeated in it, a little; more shards are better.
"""

out_dir = "out-fineweb-4070-fast"
dataset = "fineweb"

arch = "modern"
optimizer = "muon"

batch_size = 16
gradient_accumulation_steps = 32
block_size = 1024

n_layer = 12
n_head = 6
n_embd = 768

max_iters = 3250

dtype = "bfloat16"
compile = True

eval_interval = 125
eval_iters = 100
log_interval = 10
