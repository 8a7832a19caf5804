"""Model files, read by mmap."""
