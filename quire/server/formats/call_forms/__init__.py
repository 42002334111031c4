"""Tool formats defined by data: the texts around calls, names, arguments, keys and values."""
