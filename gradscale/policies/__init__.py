"""The rules that adapt the scale, as arrays and as plain numbers."""
