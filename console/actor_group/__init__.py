"""Several actors of one machine, started by `nyala actor --count N --gpus all`."""
