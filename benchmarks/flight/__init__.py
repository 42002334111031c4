"""`make first-flight`: what Quire computes on a GPU, and how fast, in two calls of nine and three minutes, with only
Python, PyTorch and the GPU.

Each stage (`stages.STAGES`) is a process with a deadline, killed with its children. It writes JSON lines to
`FOLDER/STAGE.jsonl` as it finds them; a failing stage stops no other. If time is left, failed stages run again with
CUDA_LAUNCH_BLOCKING=1, which identifies the kernel, then under compute-sanitizer if installed. `FOLDER/table.txt` is
rewritten after each stage: what holds, what fails first, and shares of the GPU's limits.
"""
