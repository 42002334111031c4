"""Images on the device."""
