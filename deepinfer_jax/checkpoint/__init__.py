"""Files to parameters and back."""
