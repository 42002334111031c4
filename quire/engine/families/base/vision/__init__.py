"""What a model reads of images, as data: the spec, and the fields of the files that say it."""
