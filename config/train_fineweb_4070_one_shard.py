"""One FineWeb shard, many epochs, on an RTX 4070. Drop the parquet into data/fineweb_one_shard/."""

out_dir = "out-fineweb-110M-one-shard"
dataset = "fineweb_one_shard"

batch_size = 12
gradient_accumulation_steps = 40
block_size = 1024

n_layer = 12
n_head = 8
n_embd = 512
dropout = 0.0
bias = False

learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 2000
max_iters = 250_000
lr_decay_iters = 250_000
beta2 = 0.99

compile = True

eval_interval = 500
eval_iters = 200
log_interval = 50
always_save_checkpoint = True
wandb_log = False
