"""The subcommands of `quire`, a module each with `main(argv, started) -> exit status`.

`started`: time.perf_counter() at process start.
"""
