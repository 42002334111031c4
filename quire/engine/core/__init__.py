"""Who computes which tokens, on which pages, in which step; and what is told of it. No torch, no clock, no device."""
