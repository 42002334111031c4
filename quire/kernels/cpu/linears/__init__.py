"""Which kernel of the CPU backend multiplies which weight."""
