"""Several processes that train one model: how they share batches, sequences and weights."""
