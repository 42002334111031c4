"""The fields of families' config.json by the names, and with the defaults, of Llama's. No torch."""
