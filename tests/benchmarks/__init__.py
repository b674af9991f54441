"""The benchmarks: gradscale against peers and limits in the same process.

Each module has CASES: by name, what measures some rows of the table, called with whether to be quick.
"""
