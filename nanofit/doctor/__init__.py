"""What is wrong with this machine, and what would mend it; what a card really does.

doctor.py alone uses `examine` (every question in turn), `finding` (Finding: an answer), `screen`
(findings as a person reads them) and `measure` (measure_card), which trains on the card. Its own:
`card` (card, driver and the build of torch), `compiler`, `storage` (disks and data), `system` (what
it runs on) and `child`, by which torch is asked in processes of their own: `look` tells what it
sees, `try_compile` whether it can compile.
"""
