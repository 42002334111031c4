"""Scheduling and KV cache bookkeeping: no torch, clock or device."""
