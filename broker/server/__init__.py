"""The stateless broker process."""
