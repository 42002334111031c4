"""`make first-flight`: what Quire computes on a GPU, and how fast, found out in ten minutes on a machine with nothing
but Python, PyTorch and the card.

Every stage (`stages.STAGES`) is a process with a deadline, which ends with all that it started. It writes what
it finds as it comes, a line of JSON each, to `FOLDER/STAGE.jsonl`; one that fails keeps none from running. What failed
runs again afterwards as long as there is time: with CUDA_LAUNCH_BLOCKING=1, which tells the kernel at fault, then under
compute-sanitizer where that is installed. The last thing written is one table: what holds, what fails first, and the
shares of the card's limits.
"""
