"""Scheduling and KV cache bookkeeping, without torch, clock or device."""
