"""All that an actor on another machine needs, in one file."""
