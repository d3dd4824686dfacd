"""GPT-2's medium shape on a 12 GB card."""

out_dir = "out-gpt2-medium-4070"
dataset = "fineweb"

batch_size = 4
gradient_accumulation_steps = 120
block_size = 1024

n_layer = 24
n_head = 16
n_embd = 1024

max_iters = 20_000
lr_schedule = "wsd"
warmup_iters = 700
learning_rate = 3e-4
min_lr = 3e-5

dtype = "bfloat16"
compile = True
savers = "auto"

eval_interval = 500
eval_iters = 200
log_interval = 10
