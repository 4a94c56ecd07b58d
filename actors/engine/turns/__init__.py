"""Turns of the policy: the frame that a chat template puts around one, and strings that end it."""
