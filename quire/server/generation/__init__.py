"""How a resolved call runs through the engine, and how its output becomes the bytes of the answer."""
