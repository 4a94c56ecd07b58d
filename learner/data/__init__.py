"""From curriculum to claimed batch."""
