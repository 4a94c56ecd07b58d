"""References that are written from the code: settings and messages, for verbs and pages."""
