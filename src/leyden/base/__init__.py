"""Layer 0: errors, logging, names, trees of tensors and files. Knows nothing of training."""
