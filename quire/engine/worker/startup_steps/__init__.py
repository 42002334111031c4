"""Steps of start_worker."""
