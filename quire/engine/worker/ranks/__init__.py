"""A model on several ranks: processes that compute every layer together (tensor parallelism). The first rank is the
engine; the others do what it says, one forward pass after another, and know nothing of requests."""
