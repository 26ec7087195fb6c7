"""Training whole language models on one GPU, ours beside peers of the same shape."""
