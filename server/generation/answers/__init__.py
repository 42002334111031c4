"""From deltas to the bytes of OpenAI's answers: one file per endpoint."""
