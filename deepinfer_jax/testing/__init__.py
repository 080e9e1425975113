"""Comparators, tiny models and compile-time inspection, for tests, scripts and the command line."""
