"""Who may send requests, how many, and how large."""
