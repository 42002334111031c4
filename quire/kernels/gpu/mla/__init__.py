"""MLA on a GPU."""
