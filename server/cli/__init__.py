"""The subcommands of `quire`, one module each: `main(argv, started) -> exit status`."""
