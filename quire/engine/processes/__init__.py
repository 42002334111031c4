"""How processes start, are watched and end, and their sockets and calls."""
