"""What happened in each step: reports, diagnoses, logs and pictures."""
