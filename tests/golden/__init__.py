"""The golden set: compares what users and files see of two versions of Quire. `make golden BASE=<commit>`.

A commit that changes the form of the code and no behavior is proven by it: it captures the same things of both trees
and prints what differs. Ids, times, ports and folders are masked. All sections take five minutes on two quiet cores:

- help: --help of every command
- plans: quire plan --json of every config in the catalogue and of every tiny family
- specs: the spec of every tiny family, its parameters' shapes, the names of tensors in checkpoints and GGUF files;
  --renames FILE maps class names, and SPEC_READERS in inside.py has a row for each place where specs were
- tokens: greedy tokens and log probabilities of every tiny family, vectors of encoders
- http: OpenAPI, metric names, pages, 60 seeded requests of all APIs, 1,400 damaged bodies, log lines
- agents: the requests that coding agents were recorded to send
- disk: a data folder, journal, receipts and KV tier that the base wrote before it was killed
- code (only if named): the instructions of every module with numbers for names; empty for a commit that renames

A commit that means a difference says so in its message.
"""
