"""Tool call formats, chosen from the chat template's text or by flag."""
