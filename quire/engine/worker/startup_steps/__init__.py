"""What a start of the device half is made of."""
