"""How models write what is not content (thinking, tool calls), and grammars that make them write it."""
