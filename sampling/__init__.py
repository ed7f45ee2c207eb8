"""Text from a model: generation, the cache of keys and values, one new token and its kernels."""
