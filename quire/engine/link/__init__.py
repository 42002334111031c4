"""Between those who ask and an engine: the book of requests, and the links to an engine in a process of its own, or
one that several API processes share."""
