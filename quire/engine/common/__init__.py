"""What both halves of the engine share: the structs that flow between them, errors, configuration, the clock."""
