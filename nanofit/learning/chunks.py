"""How much is done at once: by the loss, and by Muon. Free of torch, for those who count."""

# Numbers in a batch of Muon's matrices: enough to keep a card busy, and less memory than the
# activations have left behind.
MOST_NUMBERS = 2**25


def chunk_rows(width: int, *, fused: bool = False) -> int:
    """Tokens whose logits are alive at once: about as large a buffer as the weight itself.

    Each chunk passes over its (rows, V) logits and over the (V, C) gradient, so that fewer rows
    than the width make the second cost more than the first. Twice as many halve that cost again,
    and the gradient's product is then bound by arithmetic on any card; a fused kernel, which has
    no float32 copy of the logits, needs less memory for them than half as many take without it.
    """
    rows = min(max(1 << (width - 1).bit_length(), 128), 1024)
    return 2 * rows if fused else rows
