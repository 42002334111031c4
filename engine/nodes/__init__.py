"""Machines that compute one model together: how those but the first join it."""
