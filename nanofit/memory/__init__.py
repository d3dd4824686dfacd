"""What a step needs, whatever the card: simulated, by arithmetic, explained.

Others use `setup` (Setup), `simulate` (simulate, need_of), `footprint` (the same by arithmetic,
free of torch), `budget` (what a run may use of a card), `savers`, `explain` and `picture`.
`trace`, `graphs` and `allocator` are the simulator's.
"""
