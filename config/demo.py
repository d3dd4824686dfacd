"""A small GPT on the sample shard: a first look at the whole pipeline, on any machine."""

out_dir = "out-demo"
dataset = "sample"

arch = "modern"
optimizer = "muon"

# GPT-2's vocabulary makes embedding and head nine tenths of this model: narrow is fast.
n_layer = 3
n_head = 4
n_embd = 96
block_size = 128

batch_size = 4
gradient_accumulation_steps = 1
max_iters = 500
learning_rate = 0.05
lr_schedule = "wsd"  # so that a larger max_iters goes on as if it had been asked for at once
decay_fraction = 0.3  # of which most is then kept
beta2 = 0.99
muon_steps = 5  # twelve would cost more than they give with so few tokens a step

dtype = "float32"
compile = True  # needs a C++ compiler on a CPU; without one the run says so and stays eager
eval_interval = 200
eval_iters = 16
log_interval = 20
sample_prompts = "One morning"
