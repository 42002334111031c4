"""What layers keep of sequences, and the parameters of what keeps more than keys and values. No torch."""
