"""Accelerated versions of single ops; each has the signature and the bits of its reference."""
