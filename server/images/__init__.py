"""Images of requests: where they come from, and which bytes these are."""
