"""Weight versions from announcement to staging memory."""
