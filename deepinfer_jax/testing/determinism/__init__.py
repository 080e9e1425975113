"""The determinism matrix: a base set of requests, and everything that may not change its bits."""
