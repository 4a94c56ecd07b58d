"""Episodes from lease to submission."""
