"""What several of the programs here need: flags, engines, servers and their clients, and steps of training."""
