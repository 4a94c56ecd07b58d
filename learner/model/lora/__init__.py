"""Low-rank adapters: small trained matrices beside frozen ones."""
