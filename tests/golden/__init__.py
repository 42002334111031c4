"""The golden set: compares what users and files see of two versions of Quire. `make golden BASE=<commit>`.

It proves that a commit changes code but not behavior. DEVELOPERS.md lists the contents of each section.
"""
