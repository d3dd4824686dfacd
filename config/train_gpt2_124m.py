"""GPT-2's smallest model, as nanoGPT reproduces it, on one card."""

out_dir = "out-gpt2-124m"
dataset = "fineweb"

batch_size = 12
gradient_accumulation_steps = 40
block_size = 1024

n_layer = 12
n_head = 12
n_embd = 768

max_iters = 20_000
lr_schedule = "wsd"
warmup_iters = 700

dtype = "bfloat16"
compile = True

eval_interval = 500
eval_iters = 200
log_interval = 10
