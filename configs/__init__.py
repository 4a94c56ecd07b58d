"""Settings, errors, logging; the presets beside them. Imports nothing of ours."""
