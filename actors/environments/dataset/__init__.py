"""The environment `dataset`: questions and answers out of a file.

environment  Questions out of a file: `environment: dataset`
programs     Scorer `code`: the program of a completion, run against the tests of its row in a
             sandbox
rows         Rows of a dataset by number: JSON lines, JSON, CSV, parquet, or whatever `datasets`
             loads
scorers      Scorers of final answers, by the name in `environment_settings.scorer`
"""
