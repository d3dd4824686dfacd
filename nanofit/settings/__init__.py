"""What is asked for: files and flags -> frozen, checked settings. Knows nothing of torch.

Others use `shape` (GPTConfig) and `config` (TrainConfig, RunConfig, load_config, describe_knobs,
flatten). `assignments` reads config files without executing them and is config's alone.
"""
