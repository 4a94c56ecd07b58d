"""Finished or running runs on one page: `report.html`, without scripts and without a network.

curve_charts  Charts of figures over batches: a line for each figure, and for each run where there
              are some
curves        Figures of a run by batch, and its evaluations, from `metrics.jsonl` and `eval.jsonl`
drawing       Lines, bands, bars and spans as SVG paths in a frame with ticks: arithmetic alone
model_card    The model card of a trained model: its `README.md`, as the Hugging Face hub shows it
record        A run as its report shows it, read from its folder: actors' lives, answers, changed
              settings
run_charts    Charts of one run each: lives of its actors, spread of ratios and lags, the learner's
              time
sections      Contents of a report: figures, settings and versions of runs, and charts with their
              numbers
write         `nyala report`: `report.html`, a template filled with runs, one file that needs
              nothing else
"""
