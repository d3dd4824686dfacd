"""What a step needs, whatever the card: by arithmetic, simulated, explained.

Others use `setup` (Setup), `need` (need_of, evaluation_need, components_of), which answers by the
ledger's arithmetic or else by simulation, `course` (Curve), what an answer is made of, `budget`
(budget_of, usable_bytes: what a run may use of a card), `savers`, `shards` (groups_of: how several
cards cut a model), `several` (room_bytes: of a card among several), `explain`, `picture`, `tables`,
and `simulate`, which with what it uses alone loads torch. Its own: `ledger`, the arithmetic, and
the simulator's `trace`, `graphs`, `spread` and `allocator`.
"""
