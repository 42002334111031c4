"""The subcommands of `quire`: modules with `main(argv, started)`, which returns the exit status. `started`:
time.perf_counter() at process start.
"""
