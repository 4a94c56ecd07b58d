"""Files of a new project, which `nyala new` copies; they work as they are."""
