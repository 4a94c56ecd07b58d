"""Runs of one settings file with several values: `nyala sweep`.

grid   Runs of a sweep: one for each combination of values, named by them, and the outcome of each
page   `sweep.html`: the runs of a sweep as a table, their curves, and their score over each setting
study  A search in place of a grid: optuna proposes the values of each run from the scores so far
sweep  `nyala sweep`: the runs of a sweep prepared, made, and summed up in a table and a page
"""
