"""A process of ours: how it is started, watched and ended, and the sockets between two of them."""
