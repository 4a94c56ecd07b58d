"""What a person types and looks at."""
