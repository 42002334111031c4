"""How one of our processes is started, watched and ended, the sockets between two of them, and the calls over these."""
