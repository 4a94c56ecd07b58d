"""The environment `dataset`: questions and answers out of a file.

environment  Questions out of a file: `environment: dataset`
math_worker  Process of the scorer `math-verify`: `python -P -m
             actors.environments.dataset.math_worker`
mathematics  Scorer `math-verify`: expressions that are equal, compared by the package of that name
programs     Scorer `code`: the program of a completion, run against the tests of its row in a
             sandbox
rows         Rows of a dataset by number: JSON lines, JSON, CSV, parquet, or whatever `datasets`
             loads
scorers      Scorers of final answers, by the name in `environment_settings.scorer`
"""
