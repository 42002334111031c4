"""Speed of this machine."""
