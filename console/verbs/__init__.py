"""The commands of `nyala`."""
