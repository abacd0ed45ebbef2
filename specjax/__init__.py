"""specjax: speculative decoding research in JAX."""
