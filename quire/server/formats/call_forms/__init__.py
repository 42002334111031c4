"""Tool formats made of data: what stands around calls, names, arguments, keys and values, and what reads it."""
