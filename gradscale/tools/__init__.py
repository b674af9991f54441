"""What people use beside a training loop: the command line, pictures, logs, simulation, other scalers, tests."""
