"""Reference mathematics in plain jax.numpy, one file per term of the specification."""
