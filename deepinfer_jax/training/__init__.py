"""Training of small models with the network of `model/`; nothing of the product imports it."""
