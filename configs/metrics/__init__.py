"""Metrics over HTTP: `/metrics` for Prometheus, `/livez` and `/readyz` for supervisors."""
