"""The benchmarks: gradscale against peers and limits in the same process."""
