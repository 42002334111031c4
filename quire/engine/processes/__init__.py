"""How processes are started, watched and ended, and the sockets and calls between them."""
