"""Tool formats defined by the texts around calls, names, arguments, keys and values."""
