"""A small GPT on the sample shard: a first look at the whole pipeline, on any machine."""

out_dir = "out-demo"
dataset = "sample"

# GPT-2's vocabulary makes the last layer nine tenths of this model: narrow is fast.
n_layer = 3
n_head = 4
n_embd = 96
block_size = 128

batch_size = 4
gradient_accumulation_steps = 1
max_iters = 800
learning_rate = 4e-3
min_lr = 4e-4
lr_schedule = "wsd"  # so that a larger max_iters goes on as if it had been asked for at once
warmup_iters = 50
beta2 = 0.99

dtype = "float32"
compile = True  # needs a C++ compiler on a CPU; without one the run says so and stays eager
eval_interval = 200
eval_iters = 16
log_interval = 50
