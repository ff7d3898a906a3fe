"""The ground: files, processes, memory, the terminal."""
