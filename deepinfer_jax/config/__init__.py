"""What the model is and how to run it: the lowest package, which imports no JAX."""
