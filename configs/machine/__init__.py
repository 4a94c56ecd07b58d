"""Facts about the machine that a process runs on."""
