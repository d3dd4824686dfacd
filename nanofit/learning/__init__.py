"""One optimiser step, whole or undone.

Others use `step` (train_step, evaluate, UpdateInterrupted), `engine` (Engine, engine_for),
`sharded` (Shards), `optim` (build_optimizer, and lr_at with the rest of the learning rate's curve),
`undo` (UpdateUndo), `compiler` (compile_in_place), `loss` (chunked_loss, full_loss, token_losses)
and `chunks` (chunk_rows), which is free of torch.
Its own: `moments`, AdamW in 32 and 8 bits, and `muon`, both optim's.
"""
