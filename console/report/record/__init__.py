"""A run read from the files of its folder, as its report shows it."""
