"""The device mesh and everything that crosses it."""
