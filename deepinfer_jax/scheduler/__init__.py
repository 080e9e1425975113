"""Who runs next: numpy only, no JAX."""
