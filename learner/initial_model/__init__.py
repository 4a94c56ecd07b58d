"""Small initial models, for runs that have no pretrained one."""
