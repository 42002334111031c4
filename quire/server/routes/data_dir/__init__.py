"""What is kept in --data-dir: conversations, files and batches."""
