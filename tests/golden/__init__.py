"""The golden set: what users and files see of two versions of Quire, side by side. `make golden BASE=<commit>`.

A commit that changes the form of the code and no behavior is proven by it: it captures the same things of both trees
and prints what differs. DEVELOPERS.md says what each section holds.
"""
