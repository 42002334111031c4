"""Small cases of what a model computes, by which a backend shows on a device that it computes right."""
