"""From the requests of other APIs than chat and completions: each is translated to a chat."""
