"""A small GPT on the sample shard: a first look at the whole pipeline, on any machine."""

out_dir = "out-demo"
dataset = "sample"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 128

batch_size = 16
gradient_accumulation_steps = 1
max_iters = 400
learning_rate = 3e-3
min_lr = 3e-4
warmup_iters = 40
beta2 = 0.99

dtype = "float32"
compile = False
eval_interval = 100
eval_iters = 8
log_interval = 10
