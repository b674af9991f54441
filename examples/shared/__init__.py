"""What the examples share: the digits, ranks of MPI, options, and what is shown of the runs."""
