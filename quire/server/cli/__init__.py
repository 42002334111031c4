"""The subcommands of `quire`, one module each, with a function `main(argv, started) -> exit status`.

`started` is time.perf_counter() at the start of the process.
"""
