"""How models write tool calls: one small class per format, chosen from the chat template's text or by flag."""
