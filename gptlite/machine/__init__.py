"""What the rest stands on: files, processes, memory, the terminal."""
