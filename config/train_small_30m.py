"""A 6-layer GPT with short sequences: a first real run on any card."""

out_dir = "out-small-30m"
dataset = "fineweb"

batch_size = 16
gradient_accumulation_steps = 4
block_size = 512

n_layer = 6
n_head = 6
n_embd = 384

max_iters = 20_000
warmup_iters = 500
learning_rate = 1e-3
min_lr = 1e-4

dtype = "float16"
compile = True

eval_interval = 1000
eval_iters = 100
log_interval = 10
