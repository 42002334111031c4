"""The families that take images: a file each says what is read of an image, and of which family the text is."""
