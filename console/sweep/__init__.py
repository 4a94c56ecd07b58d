"""Runs of one settings file with several values: `nyala sweep`.

grid   The runs of a sweep: every combination of the values, each with a name that its values make
page   `sweep.html`: the runs of a sweep as a table, their curves, and their score over each setting
study  A search in place of a grid: optuna proposes the values of each run from the scores so far
sweep  One sweep: its runs prepared, made, and summed up in a table and a page
"""
