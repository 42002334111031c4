"""Several engines of one model behind one client: which of them computes a request, and what becomes of it when that
one ends."""
