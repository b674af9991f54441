"""What gradscale.testing offers."""
