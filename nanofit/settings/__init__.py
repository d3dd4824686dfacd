"""What is asked for: files and flags -> frozen, checked settings. Knows nothing of torch.

Others use `shape` (GPTConfig) and `config` (Settings, TrainConfig, RunConfig, load_config,
describe_knobs, answer_help, flatten). Its own: `assignments`, which reads config files without
executing them.
"""
