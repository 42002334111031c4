"""Our processes: how each is started, watched and ended, and the sockets and calls between them."""
