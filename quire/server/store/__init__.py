"""What the Responses API keeps, in SQLite."""
