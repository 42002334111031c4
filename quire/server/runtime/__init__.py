"""The models that this process serves, with their services."""
