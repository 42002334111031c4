"""How models write tool calls and thinking, and grammars that enforce it."""
