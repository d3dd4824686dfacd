"""What a step needs, whatever the card: simulated, by arithmetic, explained.

Others use `setup` (Setup), `need` (need_of, course_of), `course` (what these answer), `budget`
(what a run may use of a card), `savers`, `explain`, `tables` and `picture`. `ledger` writes a step
down by arithmetic, free of torch; `simulate` runs its code on tensors without content.
`trace`, `graphs` and `allocator` are the simulator's.
"""
