"""From the pydantic body of a request to the one resolved form, GenerationRequest."""
