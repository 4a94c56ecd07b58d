"""Finished or running runs on one page: `report.html`, without scripts and without a network."""
