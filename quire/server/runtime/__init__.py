"""The server's process: the models that it serves, and what each of them and all of them need."""
