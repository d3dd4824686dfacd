"""What there is to compute on: cards, the device of a process, its memory, other processes.

Others use `cards` (CARDS, find_card, known_card, check_gpus), `measured` (CardReport: what cards
did), `nvml` (look_at_driver: its cards, and who uses them) and `overhead` (what a process takes
besides its tensors), all free of torch, `device` (Device, describe_device), `memory` (DeviceMemory,
available_bytes, is_out_of_memory) and `dist` (Ranks, start_ranks). All lines for CUDA are in
`device` and `memory`.
"""
