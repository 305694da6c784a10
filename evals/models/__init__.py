"""Models made here, from a seed."""
