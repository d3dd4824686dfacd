"""A 12-layer GPT on FineWeb with the numbers people start from.

The logits of 16 sequences at once are what runs out of memory elsewhere; here they never exist.
"""

out_dir = "out-fineweb"
dataset = "fineweb"

batch_size = 16
gradient_accumulation_steps = 32
block_size = 1024

n_layer = 12
n_head = 12
n_embd = 576

max_iters = 9000
lr_decay_iters = max_iters
warmup_iters = 700

dtype = "bfloat16"
compile = True

eval_interval = 500
eval_iters = 200
log_interval = 10
