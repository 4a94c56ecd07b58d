"""Two runs beside each other: `nyala compare`."""
