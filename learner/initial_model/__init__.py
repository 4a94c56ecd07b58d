"""Small initial models, made and trained here."""
