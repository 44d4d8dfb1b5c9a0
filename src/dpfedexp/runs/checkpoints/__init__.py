"""The last completed round on disk, and what makes it the run that it is."""
