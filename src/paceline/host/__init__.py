"""The machine and processes of a run: cores, memory, accelerators, ranks and child processes; without torch."""
