"""Layer 3: the engine. `fit` is the training loop, `evaluate` and `predict` the other two; the rest serves them."""
