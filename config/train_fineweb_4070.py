"""A 12-layer GPT on one FineWeb shard with an RTX 4070 (12 GB)."""

out_dir = "out-fineweb-4070"
dataset = "fineweb"

# The product counts: autofit may cut the same sequences into other micro-batches.
batch_size = 12
gradient_accumulation_steps = 40
block_size = 1024

n_layer = 12
n_head = 12
n_embd = 576

max_iters = 5000
lr_schedule = "wsd"  # so that the run can be extended
warmup_iters = 250

dtype = "float16"
compile = True
compile_after = 100
autofit = True

eval_interval = 250
eval_iters = 100
log_interval = 10
