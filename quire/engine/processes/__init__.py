"""A process of ours: how it is started, watched and ended, the sockets between two of them, and the
calls that go over these."""
