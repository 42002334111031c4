"""Writers that turn deltas into the bytes of answers, one file per answer form."""
