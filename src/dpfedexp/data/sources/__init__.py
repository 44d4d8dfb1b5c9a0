"""What people hold their data in, read into arrays."""
