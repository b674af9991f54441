"""Reports of steps and iterations, diagnoses, logs and pictures."""
