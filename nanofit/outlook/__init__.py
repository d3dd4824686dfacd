"""Cost and loss, before and during a run: arithmetic, free of torch.

Others use `scaling` (expected losses, useful epochs), `roofline` (the time of a step by its FLOPs
and bytes), `links` (what several cards tell each other, and how long that takes), `forecast`
(Forecast: a run in numbers), `plan` (Plan: those of a run, its data and its machine, and what would
be better), `choice` (choose: the model and recipe that suit a machine, data and hours, for
--model=auto) and `capacity` (Capacity: what a choice has to know of a machine).
"""
