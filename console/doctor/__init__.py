"""`nyala doctor`: all checks of a machine, of settings and of a run, one after the other."""
