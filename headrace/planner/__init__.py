"""What fits: arithmetic on the memory at hand, before anything is loaded."""
