"""What there is to compute on: cards, the device of a process, its memory, other processes.

Others use `cards` (a table, free of torch), `device` (Device, describe_device), `memory`
(DeviceMemory, is_out_of_memory), `overhead` (what a process takes besides its tensors) and `dist`
(Ranks). All lines for CUDA are in `device` and `memory`.
"""
